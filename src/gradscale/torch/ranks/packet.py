"""The round of a step: the few numbers that every rank sends, and what all of them know afterwards."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Number = Any  # a 0-d tensor, or a float before it is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a rank sends, and, summed, what all of them receive. Each is a number or a 0-d tensor.

    Attributes:
        failed: 1 if the rank cannot take part in the step.
        failed_rank: the number of the rank if it cannot.
        missed: 1 if the rank has missed a step that others may have applied.
        asks_flags: 1 if the rank is not in a step: it asks for flags of all ranks, in `FLAGS`.
        gradients: 1 if the rank has any.
        bad: 1 if a gradient is not finite.
        bad_loss: 1 if a loss is not finite.
        spread: squares of the gradients that are spread over ranks, summed, each divided by its copies.
        same: squares of the gradients that are the same on every rank, summed.
        same_squared: the square of `same`, which tells whether they are.
        holders: 1 if the rank has gradients of that kind.
        above: how many elements are above the edge that a policy watches.
        elements: of how many.
        scale: the scale.
        scale_squared: its square, which tells whether all ranks have the same.
        sends_amax: 1 if the rank sends its largest magnitude, too.
        asks_norm: 1 if the rank has read a norm.
        follows: 1 if the rank has no batches left, and only follows the others.
        smaller_meshes: 1 if the rank has gradients on a mesh that not all ranks are in.
    """

    failed: Number = 0.0
    failed_rank: Number = 0.0
    missed: Number = 0.0
    asks_flags: Number = 0.0
    gradients: Number = 0.0
    bad: Number = 0.0
    bad_loss: Number = 0.0
    spread: Number = 0.0
    same: Number = 0.0
    same_squared: Number = 0.0
    holders: Number = 0.0
    above: Number = 0.0
    elements: Number = 0.0
    scale: Number = 0.0
    scale_squared: Number = 0.0
    sends_amax: Number = 0.0
    asks_norm: Number = 0.0
    follows: Number = 0.0
    smaller_meshes: Number = 0.0


NAMES = [field.name for field in fields(Facts)]
"""The numbers in the order in which they are sent."""


FLAGS = ("bad", "bad_loss", "above")
"""Those that have flags in their place where a rank asks for flags: none that ranks in a step raise an error for."""


def with_flags(flags: Tensor) -> Facts:
    """Returns what a rank sends that asks which of `flags`, a vector of bools, are set on any rank: 3 at most."""
    return Facts(asks_flags=1.0, **dict(zip(FLAGS, flags.unbind(), strict=False)))


class Received(NamedTuple):
    """What a rank knows after the round, the same on every rank.

    Attributes:
        facts: the sums over all ranks, 0-d tensors.
        amax: the largest magnitude on any of them; None where this rank has not sent one.
    """

    facts: Facts
    amax: Tensor | None


def exchange(facts: Facts, amax: Tensor | None, device: torch.device, group: Any) -> Received:
    """Sends the facts of this rank and returns those of all: one round of small all-reduces.

    A sum, and beside it a maximum where `amax` is given, both on their way at once. Every rank must call it. Does not
    synchronize with an accelerator.
    """
    packed = _packed(facts, device)
    largest = None if amax is None else amax.detach().clone()
    works = [dist.all_reduce(packed, dist.ReduceOp.SUM, group=group, async_op=True)]
    if largest is not None:
        works.append(dist.all_reduce(largest, dist.ReduceOp.MAX, group=group, async_op=True))
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return Received(Facts(**dict(zip(NAMES, packed.unbind(), strict=True))), largest)


def join_maximum(device: torch.device, group: Any) -> Tensor:
    """Returns the maximum of a round in which this rank has none to send, so that no other rank waits for it."""
    largest = torch.zeros((), device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def _packed(facts: Facts, device: torch.device) -> Tensor:
    # In float64 a sum of equal numbers is exact, and no square overflows.
    wide = torch.float32 if device.type == "mps" else torch.float64
    # Filled in: a copy of a number to the device would synchronize.
    # Not by `astuple`, which would copy every tensor.
    filled = [
        number.to(wide) if isinstance(number, Tensor) else torch.full((), number, dtype=wide, device=device)
        for number in (getattr(facts, name) for name in NAMES)
    ]
    return torch.stack(filled)
