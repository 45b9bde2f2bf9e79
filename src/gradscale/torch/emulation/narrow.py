"""Remembers which float32 tensors hold numbers of the format, as their dtype would say under autocast."""

import torch
from torch import Tensor

MARK = "_gradscale_narrow"


class Narrow:
    """The tensors that are narrow in one block. A tensor changed in place since it was marked is narrow no more.

    The mark is an attribute of the tensor that refers to nothing, and so keeps nothing alive.
    """

    def __init__(self) -> None:
        self._block = object()

    def mark(self, tensor: Tensor) -> Tensor:
        """Marks a tensor as narrow, and returns it."""
        setattr(tensor, MARK, (self._block, _version(tensor)))
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        block, version = getattr(tensor, MARK, (None, None))
        return block is self._block and version == _version(tensor)


def is_rounded_here(tensor: Tensor) -> bool:
    """Returns whether emulation deals with a tensor at all: float64, integers and sparse ones it leaves alone."""
    return tensor.dtype is torch.float32 and tensor.layout is torch.strided


def _version(tensor: Tensor) -> int | None:
    """Returns how often the tensor was changed in place; torch does not count it for inference tensors."""
    return None if tensor.is_inference() else tensor._version


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether one tensor is a view of the other, or both are of a third.

    Inside transforms of `torch.func` this is not known, and False. (Their tensors refuse to show their storage.)
    """
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]
