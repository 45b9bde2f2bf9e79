"""One parameter of the model, and its master, which the inner optimizer holds in its place."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.masters.contract import MasterStorage


@dataclass(slots=True)
class Master:
    """The master of a 16-bit weight. A wider parameter is its own master.

    Attributes:
        weight: the model's parameter.
        tensor: the parameter of the inner optimizer: the weight itself if it is not 16-bit. Where the storage does not
            store values, it is empty between steps.
        stored: what the storage stores beside the weight.
        version: the weight's version after the last step, which counts in-place writes.
        address: the address of the weight's data then, which changes when the data is replaced.
    """

    weight: Tensor
    tensor: Tensor
    stored: Tensor
    version: int
    address: int

    @property
    def is_half(self) -> bool:
        """Whether the weight is 16-bit, and so has a master of its own."""
        return self.tensor is not self.weight

    @property
    def weight_unchanged(self) -> bool:
        """Whether nothing else has written to the weight since `note_weight`."""
        return self.version == self.weight._version and self.address == self.weight.data_ptr()

    def note_weight(self) -> None:
        """Records version and address of the weight."""
        self.version, self.address = self.weight._version, self.weight.data_ptr()


@torch.no_grad()
def make_master(weight: Tensor, storage: MasterStorage) -> Master:
    """Returns the master of a parameter, with the parameter's value."""
    seen = weight._version, weight.data_ptr()
    if weight.dtype not in HALF_DTYPES:
        return Master(weight, weight, weight, *seen)
    stored = storage.store(weight)
    if storage.stores_values:
        return Master(weight, stored, stored, *seen)
    # Empty between steps: a step sets its data to a float32 buffer for one chunk, and no copy of the model is kept.
    empty = torch.empty(0, dtype=torch.float32, device=weight.device)
    return Master(weight, nn.Parameter(empty, requires_grad=weight.requires_grad), stored, *seen)
