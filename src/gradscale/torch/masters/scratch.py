"""Float32 memory for the moment of a step, used again and again."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """Lends float32 tensors in the shape of others. All of them are taken back by the next call."""

    def __init__(self) -> None:
        self._rooms: dict[torch.device, Tensor] = {}

    def __reduce__(self) -> tuple[type["Scratch"], tuple[()]]:
        """A copy starts empty."""
        return Scratch, ()

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns a float32 tensor for each, uninitialised, with the same layout in memory where that has no gaps.

        Args:
            tensors: what they shall look like, and where they shall be.
        """
        begins: list[int] = []
        elements: dict[torch.device, int] = defaultdict(int)
        for tensor in tensors:
            begins.append(elements[tensor.device])
            elements[tensor.device] += tensor.numel()
        rooms = {device: self._room(device, count) for device, count in elements.items()}
        # One view each: a view of a piece that `split` returns takes three times as long.
        return [
            rooms[tensor.device].as_strided(tensor.shape, _stride(tensor), begin)
            for tensor, begin in zip(tensors, begins, strict=True)
        ]

    def _room(self, device: torch.device, elements: int) -> Tensor:
        room = self._rooms.get(device)
        if room is None or room.numel() < elements:
            room = self._rooms[device] = torch.empty(elements, dtype=torch.float32, device=device)
        return room


def _stride(tensor: Tensor) -> Sequence[int]:
    """Returns the strides of a copy without gaps.

    Kernels that go through memory from end to end need all their tensors in one layout: a channels-last weight's too.
    """
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
