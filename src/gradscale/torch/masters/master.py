"""One parameter of the model, and its master, which the inner optimizer holds in its place.

Masters of distributed parameters (FSDP2, tensor parallel) are DTensors, of which each rank computes its own part: norms
over a whole parameter in the inner optimizer, and its saved state, are those of the whole. Storages read and write what
this rank holds.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.kernels.torch_storage import MasterStorage
from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.gradients import local


@dataclass
class Master:
    """The master of a 16-bit weight.

    Attributes:
        weight: the model's parameter.
        tensor: the parameter of the inner optimizer, distributed as the weight is. Where the storage does not store
            values, it is empty between steps.
        stored: what the storage stores beside the weight, or beside what this rank holds of it. If that is the values,
            the same object as `tensor`, so that it is in a copy too.
        dtype: the dtype that the weight had when the master was made.
        loaded: a saved value that `sync` is to take over.
        seen: `now` after the last step; None if the weight has been written to.
    """

    weight: Tensor
    tensor: Tensor
    stored: Tensor
    dtype: torch.dtype
    loaded: Tensor | None = None
    seen: tuple[int, int] | None = None

    @property
    def fits(self) -> bool:
        """Whether the weight still has the dtype and device that the master was made for.

        `model.half()`, `model.float()` and `model.to(device)` change them, and not the parameter's identity.
        """
        return self.weight.dtype is self.dtype and self.weight.device == self.stored.device

    @property
    def now(self) -> tuple[int, int]:
        """How often the weight was written to in place, itself or what this rank holds of it, and where that is."""
        part = local(self.weight)
        # A DTensor and its local part count their writes separately, and both counts only grow.
        return self.weight._version + (0 if part is self.weight else part._version), part.data_ptr()

    def note_weight(self) -> None:
        """Records that the master is that of the weight as it is now."""
        self.seen, self.loaded = self.now, None

    def sync(self, storage: MasterStorage) -> None:
        """Takes over a loaded value where it rounds to the weight, or what other code has written to the weight."""
        weight, stored = local(self.weight), local(self.stored)
        if self.loaded is not None:
            storage.restore(local(self.loaded), weight, stored)
        elif self.seen == self.now:
            return
        elif storage.stores_values:
            # Values that round to the weight stay: weights swapped for an average and back again keep their low bits.
            storage.restore(stored, weight, stored)
        else:
            stored.zero_()
        self.note_weight()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy, in which only a write to the weight since it was `seen` is noted."""
        return vars(self) | {"seen": self.seen if self.seen == self.now else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A copy of the weight has a version and an address of its own.
        if self.seen is not None:
            self.seen = self.now


@torch.no_grad()
def made_anew(weight: Tensor, master: Master | None, storage: MasterStorage) -> Master:
    """Returns another master for a 16-bit weight, in place of one that does not fit it, or of none.

    What that one stores is copied if the dtype is the same, for `sync` to compare with the weight. Else the weight is
    the value.
    """
    part = local(weight.detach())
    stored = storage.store(part)
    # Empty between steps: a step sets its data to a float32 buffer for one chunk, and no copy of the model is kept.
    values = stored if storage.stores_values else part.new_empty(0, dtype=torch.float32)
    tensor = nn.Parameter(distributed_as(weight, values), requires_grad=weight.requires_grad)
    made = Master(weight, tensor, tensor if storage.stores_values else stored, weight.dtype)
    made.note_weight()
    if master is not None:
        made.loaded = master.loaded
        if master.dtype is weight.dtype:
            made.stored.copy_(master.stored)
            made.seen = None
    return made


def value_of(weight: Tensor, master: Master | None, storage: MasterStorage) -> Tensor:
    """Returns the float32 value of a parameter that the next step starts from. Changes nothing, unlike `sync`."""
    if weight.dtype not in HALF_DTYPES:
        return weight
    # The weight may be about to be written again: loaded values must outlast a look at them before the model is
    # loaded, and low bits one while the weights are swapped for others.
    if master is None or master.loaded is not None or not (master.fits and master.seen == master.now):
        master = made_anew(weight.detach().clone(), master, storage)
        master.sync(storage)
    if storage.stores_values:
        return master.tensor
    return distributed_as(weight, storage.read([local(master.weight)], [master.stored])[0])


def distributed_as(model: Any, part: Tensor) -> Tensor:
    """Returns `part`, this rank's part of a whole that is distributed as `model` is, as such a tensor.

    In the same memory, and without communication. If `model` is a plain tensor, `part` itself.
    """
    if not hasattr(model, "to_local"):
        return part
    from torch.distributed.tensor import DTensor  # not above: it takes a second

    shape, stride = model.shape, tuple(model.stride())
    return DTensor.from_local(part, model.device_mesh, model.placements, run_check=False, shape=shape, stride=stride)


def set_part(tensor: Any, part: Tensor) -> None:
    """Makes `part` the memory of `tensor`, or of what this rank holds of it. The tensor stays the same object."""
    # As FSDP2 does it: `data` of a DTensor is not where its numbers are.
    setattr(tensor, "_local_tensor" if hasattr(tensor, "to_local") else "data", part)


def copied_for(weight: Any, value: Any) -> Tensor:
    """Returns a saved value, which may be distributed in another way or not at all, distributed as the weight is."""
    # Copied in any case: it is used at the next step, and the caller may change the dict before.
    value = value.detach().to(weight.device, torch.float32, copy=True)
    if not hasattr(weight, "to_local"):
        return value.full_tensor() if hasattr(value, "to_local") else value
    if hasattr(value, "to_local"):
        return value.redistribute(weight.device_mesh, weight.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, weight.device_mesh, weight.placements)
