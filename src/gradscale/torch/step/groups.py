"""Tensors sorted by what one multi-tensor kernel takes: one device, one real type."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Alike(NamedTuple):
    """Tensors of one device and type.

    Attributes:
        device: where they are.
        dtype: their type, a real one.
        positions: which of all the tensors they are.
        tensors: the tensors; of complex ones, the two parts as one real view.
    """

    device: torch.device
    dtype: torch.dtype
    positions: Sequence[int]
    tensors: list[Tensor]


def alike(tensors: Sequence[Tensor]) -> list[Alike]:
    """Returns the tensors by device and type. Nearly always all have the same, and that is quick to see."""
    devices = {CPU} if all_on_cpu(tensors) else {tensor.device for tensor in tensors}
    dtypes = {tensor.dtype for tensor in tensors}
    if len(devices) == len(dtypes) == 1 and not (dtype := dtypes.pop()).is_complex:
        return [Alike(devices.pop(), dtype, range(len(tensors)), list(tensors))]
    return list(_sorted([as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]))


def _sorted(tensors: Sequence[Tensor]) -> Iterator[Alike]:
    found: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault((tensor.device, tensor.dtype), []).append(position)
    for (device, dtype), positions in found.items():
        yield Alike(device, dtype, positions, [tensors[position] for position in positions])


def all_on_cpu(tensors: Sequence[Tensor]) -> bool:
    """Returns whether every tensor is in the host's memory."""
    return all([tensor.is_cpu for tensor in tensors])  # a list: a generator takes twice as long


def as_real(tensor: Tensor) -> Tensor:
    """Returns the two parts of a complex tensor as one real view; of a conjugate, the parts of what it is a view of.

    Size, finiteness, clamping and multiplying by a real number are the same for both.
    """
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
