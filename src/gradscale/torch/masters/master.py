"""One parameter of the model, and its master, which the inner optimizer holds in its place."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.local import local
from gradscale.torch.masters.contract import MasterStorage
from gradscale.torch.masters.distributed import distributed_as, set_part, version_and_address
from gradscale.torch.masters.step_buffers import StepBuffer

WRITTEN = -1
"""The `version` of a master whose weight has been written to: no tensor has it."""


@dataclass(slots=True)
class Master:
    """The master of a 16-bit weight. A wider parameter is its own master.

    Attributes:
        weight: the model's parameter.
        tensor: the parameter of the inner optimizer: the weight itself if it is not 16-bit. Where the storage does not
            store values, it is empty between steps. Distributed as the weight is.
        stored: what the storage stores beside the weight, or beside what this rank holds of it. If that is the values,
            the same object as `tensor`, so that it is in a copy too.
        dtype: the dtype that the weight had when the master was made.
        version: the weight's version after the last step, which counts in-place writes.
        address: the address of the weight's data then, which changes when the data is replaced.
    """

    weight: Tensor
    tensor: Tensor
    stored: Tensor
    dtype: torch.dtype
    version: int
    address: int

    @property
    def is_half(self) -> bool:
        """Whether this is a master of a 16-bit weight, apart from it."""
        return self.tensor is not self.weight

    @property
    def fits(self) -> bool:
        """Whether the weight still has the dtype and device that the master was made for.

        `model.half()`, `model.float()` and `model.to(device)` change them, and not the parameter's identity.
        """
        if self.tensor is self.weight:
            return self.weight.dtype not in HALF_DTYPES
        return self.weight.dtype is self.dtype and self.weight.device == self.stored.device

    @property
    def weight_unchanged(self) -> bool:
        """Whether nothing else has written to the weight since `note_weight`."""
        return version_and_address(self.weight) == (self.version, self.address)

    def note_weight(self) -> None:
        """Records version and address of the weight."""
        self.version, self.address = version_and_address(self.weight)

    def sync(self, storage: MasterStorage, loaded: Tensor | None) -> None:
        """Takes over a loaded value where it rounds to the weight, or what other code has written to the weight."""
        if loaded is not None:
            storage.restore(local(loaded), local(self.weight), local(self.stored))
        elif self.weight_unchanged:
            return
        else:
            storage.adopt(local(self.weight), local(self.stored))
        self.note_weight()

    def value(self, storage: MasterStorage, loaded: Tensor | None) -> Tensor:
        """Returns the value that the next step starts from. Changes nothing, unlike `sync`."""
        # The weight may be about to be written again: loaded values must outlast a look at them before the model is
        # loaded, and low bits one while the weights are swapped for others.
        if self.weight.dtype not in HALF_DTYPES:
            return self.weight
        found = self
        if loaded is not None or not (self.fits and self.weight_unchanged):
            found = made_anew(self, storage)
            found.weight, found.version = self.weight.detach().clone(), WRITTEN
            found.sync(storage, loaded)
        if storage.stores_values:
            return found.tensor
        return distributed_as(found.weight, storage.read([local(found.weight)], [found.stored], StepBuffer())[0])

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy, in which only a write to the weight since `note_weight` is noted."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return state | {"version": self.version if self.weight_unchanged else WRITTEN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        # A copy of the weight has a version and an address of its own.
        if self.version != WRITTEN:
            self.note_weight()


def own_master(weight: Tensor) -> Master:
    """Returns a master that is the parameter itself. It does not fit a 16-bit parameter."""
    return Master(weight, weight, weight, weight.dtype, *version_and_address(weight))


@torch.no_grad()
def made_anew(master: Master, storage: MasterStorage) -> Master:
    """Returns another master for the weight, which fits it.

    What is stored is copied if the dtype is the same, for `sync` to compare with the weight. Else the weight is the
    value.
    """
    weight = master.weight
    made = own_master(weight)
    if made.fits:
        return made
    part = local(weight.detach())
    made.stored = storage.store(part)
    values = made.stored if storage.stores_values else torch.empty_like(part, dtype=torch.float32)
    made.tensor = nn.Parameter(distributed_as(weight, values), requires_grad=weight.requires_grad)
    if storage.stores_values:
        made.stored = made.tensor
    else:
        # Empty between steps: a step sets its data to a float32 buffer for one chunk, and no copy of the model is kept.
        set_part(made.tensor, values.new_empty(0))
    if master.is_half and master.dtype is weight.dtype:
        made.stored.copy_(master.stored)
        made.version = WRITTEN
    return made
