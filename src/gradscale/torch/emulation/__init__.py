"""`emulate`: training in any number format on any machine, with rounding to that format and float32 kernels."""

from gradscale.torch.emulation.context import emulate

__all__ = ["emulate"]
