"""The norm over the gradients of all ranks: what each of them sends for it, and what the sums tell."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradscale.engine.measurement import LARGEST_NORM, Measurement
from gradscale.policies.contract import Seen
from gradscale.torch.ranks.faults import gathered, refuse_distinct_meshes
from gradscale.torch.ranks.packet import Facts, Received
from gradscale.torch.ranks.placements import Placements
from gradscale.torch.step.gradients import Gradients
from gradscale.torch.step.host_copy import in_host_memory


class Norms:
    """What this rank sends for the norm over all ranks, by how its gradients are spread."""

    def __init__(self, placements: Placements) -> None:
        """Takes how the gradients are spread."""
        self._placements = placements
        self._meshes_compared = False

    def weights(self, gradients: Gradients, group: Any) -> Sequence[float] | None:
        """Returns what the elements of each gradient count here, so that over all ranks each element counts once.

        None if all of them count the same.
        """
        return None if self._placements.all_same(gradients) else self._placements.weights(gradients, group)

    def squares(
        self, gradients: Gradients, measurement: Measurement, norm: Tensor, group: Any, divisor: Tensor | None = None
    ) -> Facts:
        """Returns the squares of the gradients, divided by `divisor`, whose norm on this rank is `norm`.

        They are 0 where a gradient is not finite: they would spoil every sum.
        """
        if self._placements.all_same(gradients):
            spread, same, any_same = 0.0, norm.double().square(), len(gradients) > 0
        else:
            sizes = cast(Tensor, measurement.sizes).double()
            sizes = sizes if divisor is None else sizes * (1.0 / divisor)
            spread, same, any_same = self._placements.squares(gradients, sizes, group)
        known = torch.isfinite(norm)
        spread, same = (torch.where(known, size, 0.0) for size in (spread, same))
        holders = known * float(any_same)
        return Facts(bad=1.0 - known.double(), spread=spread, same=same, same_squared=same.square(), holders=holders)

    def on_smaller_meshes(self, gradients: Gradients, ranks: int) -> float:
        """Returns 1 if there are gradients on a mesh of fewer than all `ranks`, until such meshes are compared."""
        return float(not self._meshes_compared and self._placements.has_smaller_mesh(gradients, ranks))

    def compare_meshes(self, gradients: Gradients, measurement: Measurement, facts: Facts, group: Any) -> None:
        """Raises if meshes that are smaller than the group, and taken to hold the same, do not: once in a run.

        `facts` are the sums of a round. Every rank must call it.
        """
        sizes = cast(Tensor, measurement.sizes)
        if self._meshes_compared or not in_host_memory(sizes.device) or facts.bad:
            return
        if facts.smaller_meshes:
            refuse_distinct_meshes(gathered(self._placements.by_smaller_mesh(gradients, sizes, group), group))
        self._meshes_compared = True


def seen_by_all(received: Received, divisor: Tensor) -> Seen:
    """Returns what all ranks have seen of gradients that `divisor` divides, as tensors."""
    facts, unknown = received.facts, torch.zeros_like(divisor)
    norm = norm_of(facts)
    # Squares overflow before the gradients do, and nothing can be clipped by an infinite norm.
    finite = (facts.bad == 0) & (norm * divisor < LARGEST_NORM)
    return Seen(
        finite=finite,
        loss_finite=facts.bad_loss == 0,
        amax=torch.where(finite, unknown if received.amax is None else received.amax, torch.inf),
        norm=torch.where(finite, norm, torch.inf),
        upper_share=(facts.above / facts.elements.clamp(min=1)).float(),
    )


def norm_of(facts: Facts) -> Tensor:
    """Returns the norm over the gradients of all ranks: those that are the same on every rank count once."""
    return (facts.spread + facts.same / facts.holders.clamp(min=1)).sqrt().float()
