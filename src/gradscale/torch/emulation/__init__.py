"""Training in any number format on any machine, with the rounding of that format and the kernels of float32."""

from gradscale.torch.emulation.context import emulate

__all__ = ["emulate"]
