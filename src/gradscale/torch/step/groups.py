"""Tensors sorted by what one multi-tensor kernel takes: one device, one real type."""

from gradscale.kernels.torch import all_on_cpu
from gradscale.kernels.torch import tensor_groups as alike

__all__ = ["alike", "all_on_cpu"]
