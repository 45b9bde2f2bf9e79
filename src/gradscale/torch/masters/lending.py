"""What masters hold for the moment of a step only: their gradients, and their values where these are not kept."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradscale.torch.masters.scratch import Scratch
from gradscale.torch.masters.slot import Slot


def lend_values(slots: Sequence[Slot], values: Sequence[Tensor]) -> None:
    """Gives every master its value."""
    for slot, value in zip(slots, values, strict=True):
        slot.master.data = value


def lend_gradients(slots: Sequence[Slot], scratch: Scratch) -> None:
    """Gives every master the gradient of its weight in float32: the same tensor if it is float32 already, else a cast.

    One multi-tensor kernel casts all that need it. A sparse gradient is cast by itself, and stays sparse.

    Args:
        slots: those whose weights have gradients.
        scratch: where casts go.
    """
    to_cast: list[tuple[Tensor, Tensor]] = []
    for slot in slots:
        grad = slot.weight.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            slot.master.grad = grad.float()
        elif grad.dtype is torch.float32 and grad.stride() == slot.master.stride():
            slot.master.grad = grad
        else:
            to_cast.append((slot.master, grad))
    if to_cast:
        masters, grads = map(list, zip(*to_cast, strict=True))
        cast = scratch.like(masters)
        torch._foreach_copy_(cast, grads)  # pyright: ignore[reportPrivateImportUsage]
        for master, grad in zip(masters, cast, strict=True):
            master.grad = grad


def take_back(slots: Sequence[Slot], *, values: bool) -> None:
    """Leaves the masters without gradients, and without values if these were lent too."""
    for slot in slots:
        slot.master.grad = None
        if values:
            slot.master.data = slot.master.new_empty(0)
