"""Marks of float32 tensors that hold numbers of the emulated format, which under autocast would be their dtype."""

import torch
from torch import Tensor

MARK = "_gradscale_low_precision"


class LowPrecision:
    """The low-precision tensors of one block. A marked tensor that is changed in place counts as float32 again."""

    # The mark is an attribute of the tensor that refers to no other tensor, and so keeps nothing alive. A set of ids
    # would not do: the id of a tensor is reused once it is freed.
    def __init__(self) -> None:
        self._block = object()

    def mark(self, tensor: Tensor) -> Tensor:
        """Marks a tensor as low precision, and returns it."""
        setattr(tensor, MARK, (self._block, _version(tensor)))
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        block, version = getattr(tensor, MARK, (None, None))
        return block is self._block and version == _version(tensor)


def is_emulated(tensor: Tensor) -> bool:
    """Returns whether emulation applies to a tensor: not to float64, integer and sparse tensors."""
    return tensor.dtype is torch.float32 and tensor.layout is torch.strided


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether one tensor is a view of the other, or both are views of a third.

    Always False inside transforms of `torch.func`, whose tensors do not show their storage.
    """
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]


def _version(tensor: Tensor) -> int | None:
    """Returns how often the tensor was changed in place; torch does not count this for inference tensors."""
    return None if tensor.is_inference() else tensor._version
