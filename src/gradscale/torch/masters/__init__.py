"""Optimizers for FP16 and BF16 parameters that lose no update: the low bits of every weight are kept somewhere."""

from gradscale.torch.masters.optimizer import MasterWeights
from gradscale.torch.masters.ways import Kind, bytes_per_parameter

__all__ = ["Kind", "MasterWeights", "bytes_per_parameter"]
