"""One parameter of the model, and what the optimizer inside holds in its place."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradscale.torch.masters.way import Way

NARROW = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Slot:
    """A 16-bit weight and its master; or a wider parameter, which is its own.

    Attributes:
        weight: the model's parameter.
        master: what the optimizer inside holds: the weight itself if it is wide already. Where values are not held, it
            is empty between steps.
        kept: what the way keeps beside the weight.
        version: of the weight when it was left: counts the writes in place.
        address: of the weight's data then: changes when somebody replaces it.
    """

    weight: Tensor
    master: Tensor
    kept: Tensor
    version: int
    address: int

    @property
    def narrow(self) -> bool:
        """Whether the weight has a master of its own."""
        return self.master is not self.weight

    @property
    def untouched(self) -> bool:
        """Whether nobody has written to the weight since it was left."""
        return self.version == self.weight._version and self.address == self.weight.data_ptr()

    def leave(self) -> None:
        """Notes how the weight is now."""
        self.version, self.address = self.weight._version, self.weight.data_ptr()


@torch.no_grad()
def slot_for(weight: Tensor, way: Way) -> Slot:
    """Returns the slot of a parameter, with nothing lost yet.

    Args:
        weight: the model's parameter.
        way: how to keep its low bits.
    """
    state = weight._version, weight.data_ptr()
    if weight.dtype not in NARROW:
        return Slot(weight, weight, weight, *state)
    kept = way.keep(weight)
    if way.holds_values:
        return Slot(weight, kept, kept, *state)
    nothing = torch.empty(0, dtype=torch.float32, device=weight.device)
    return Slot(weight, nn.Parameter(nothing, requires_grad=weight.requires_grad), kept, *state)
