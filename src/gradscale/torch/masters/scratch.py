"""Float32 memory for the moment of a step, used again and again."""

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
            tensors: what they shall look like, all of them on one device.
        """
        sizes = [tensor.numel() for tensor in tensors]
        pieces = self._room(tensors[0].device, sum(sizes)).split(sizes)
        return [_shaped(piece, tensor) for piece, tensor in zip(pieces, tensors, strict=True)]

    def _room(self, device: torch.device, elements: int) -> Tensor:
        room = self._rooms.get(device)
        if room is None or room.numel() < elements:
            room = self._rooms[device] = torch.empty(elements, dtype=torch.float32, device=device)
        return room[:elements]


def _shaped(piece: Tensor, like: Tensor) -> Tensor:
    if like.is_contiguous():
        return piece.view(like.shape)
    # Kernels that go through memory from end to end need all their tensors in one layout: a channels-last weight's too.
    return piece.as_strided(like.shape, torch.empty_like(like, device="meta").stride(), piece.storage_offset())
