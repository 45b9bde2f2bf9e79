"""The demo in PyTorch: real FP16 autocast and emulated FP8, on a GPU or on the CPU."""

from gradscale.demo.torch.compare import DEMO, compare
from gradscale.demo.torch.train import Way

__all__ = ["DEMO", "Way", "compare"]
