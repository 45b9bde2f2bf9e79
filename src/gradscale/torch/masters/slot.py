"""One parameter of the model, and what the optimizer inside holds in its place."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradscale.torch.masters.way import Way

NARROW = (torch.float16, torch.bfloat16)


class Mark(NamedTuple):
    """What tells that nobody has written to a tensor since.

    Attributes:
        version: counts the writes in place.
        address: where the data is; changes when somebody replaces it.
    """

    version: int
    address: int


@dataclass(slots=True)
class Slot:
    """A 16-bit weight and its master; or a wider parameter, which is its own.

    Attributes:
        weight: the model's parameter.
        master: what the optimizer inside holds: the weight itself if it is wide already. Where values are not held, it
            is empty between steps.
        kept: what the way keeps beside the weight.
        mark: how the weight was left.
    """

    weight: Tensor
    master: Tensor
    kept: Tensor
    mark: Mark

    @property
    def narrow(self) -> bool:
        """Whether the weight has a master of its own."""
        return self.master is not self.weight

    @property
    def untouched(self) -> bool:
        """Whether nobody has written to the weight since it was marked."""
        return self.mark == mark_of(self.weight)

    def note(self) -> None:
        """Marks the weight as it is now."""
        self.mark = mark_of(self.weight)


@torch.no_grad()
def slot_for(weight: Tensor, way: Way) -> Slot:
    """Returns the slot of a parameter, with nothing lost yet.

    Args:
        weight: the model's parameter.
        way: how to keep its low bits.
    """
    if weight.dtype not in NARROW:
        return Slot(weight, weight, weight, mark_of(weight))
    kept = way.keep(weight)
    if way.holds_values:
        return Slot(weight, kept, kept, mark_of(weight))
    nothing = torch.empty(0, dtype=torch.float32, device=weight.device)
    return Slot(weight, nn.Parameter(nothing, requires_grad=weight.requires_grad), kept, mark_of(weight))


def mark_of(tensor: Tensor) -> Mark:
    """Returns the mark of a tensor as it is now."""
    return Mark(tensor._version, tensor.data_ptr())
