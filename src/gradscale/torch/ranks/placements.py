"""Who holds which gradient: on how many ranks each element of it is, so that a sum over ranks counts it once."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.engine.measurement import Measurement
from gradscale.torch.gradients import Gradients


class Placements:
    """How gradients are spread over the ranks that decide together.

    A plain tensor is taken to be the same on all of them, as under DDP, unless it is named as distinct. A DTensor says
    itself how it is spread over its mesh; ranks outside of the mesh are taken to hold the same, in meshes of their own,
    unless it is named. FSDP1 keeps shards in plain tensors, which its modules show.
    """

    def __init__(self, modules: Sequence[nn.Module], distinct: Any = None) -> None:
        self._modules = modules
        self._distinct = distinct if isinstance(distinct, Mapping) else {}
        # Over how many ranks every parameter is distinct.
        self._everywhere = 1 if distinct is None or isinstance(distinct, Mapping) else distinct.size()
        self._parts: dict[Tensor, int] | None = None
        self._weights: tuple[Any, Tensor] | None = None

    def squares(
        self, gradients: Gradients, measurement: Measurement, ranks: int, divisor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns two sums of squares of the gradients, divided by `divisor`, and 1 if the second has any.

        The first is over gradients that are spread over the `ranks`, each divided by its copies; the second over those
        that are the same on every rank. All are 0 where a gradient is not finite: it would spoil the sums of all ranks.
        Does not synchronize with the device, except at the first step.
        """
        norm, unscale = cast(Tensor, measurement.norm), 1.0 / divisor
        if self._all_same(gradients):
            same, any_same = (norm * unscale).double().square(), len(gradients) > 0
            spread = torch.zeros_like(same)
        else:
            sizes = cast(Tensor, measurement.sizes).double() * unscale
            rows, any_same = self.rows(gradients, ranks, sizes.device)
            spread, same = (rows @ sizes.square()).unbind()
        finite = torch.isfinite(norm * unscale)
        return torch.where(finite, spread, 0.0), torch.where(finite, same, 0.0), finite * float(any_same)

    def rows(self, gradients: Gradients, ranks: int, device: torch.device) -> tuple[Tensor, float]:
        """Returns what the square of each gradient counts, for those that are spread and for others, in two rows.

        And 1 if there are others, else 0. Does not synchronize with the device, except at the first step.
        """
        same = self._all_same(gradients)
        copies = [None] * len(gradients) if same else self._all_copies(gradients, ranks)
        return self._weights_of(copies, device), float(None in copies)

    def weights(self, gradients: Gradients, ranks: int) -> list[float] | None:
        """Returns, for each gradient, 1 over the number of `ranks` that hold the same elements; None if all do."""
        if self._all_same(gradients):
            return None
        return [1.0 / (copies or ranks) for copies in self._all_copies(gradients, ranks)]

    def _all_same(self, gradients: Gradients) -> bool:
        """Returns whether all gradients are taken to be the same on every rank."""
        # `values` is `grads` itself if all are plain and dense.
        return gradients.values is gradients.grads and self._everywhere == 1 and not self._known_parts()

    def _known_parts(self) -> Mapping[Tensor, int]:
        """Returns over how many ranks single parameters are distinct: those in shards of FSDP1, and those named."""
        if self._parts is None:  # once: process groups and wrappers are made before the first step
            parts: dict[Tensor, int] = {}
            for module in (inner for root in self._modules for inner in root.modules()):
                handle: Any = getattr(module, "_handle", None)
                if getattr(handle, "uses_sharded_strategy", False):
                    shards = [handle.flat_param, *(getattr(handle.flat_param, "_params", None) or ())]
                    parts |= dict.fromkeys(shards, dist.get_world_size(handle.process_group))
            for owner, group in self._distinct.items():
                named = owner.parameters() if isinstance(owner, nn.Module) else [owner]
                parts |= dict.fromkeys(named, group.size())
            self._parts = parts
        return self._parts

    def _parts_of(self, gradients: Gradients) -> list[int]:
        """Returns over how many ranks the parameter of each gradient is distinct."""
        parts = self._known_parts()
        return [parts.get(parameter, self._everywhere) for parameter in gradients.parameters]

    def _all_copies(self, gradients: Gradients, ranks: int) -> list[float | None]:
        """Returns on how many of `ranks` each element of a gradient is; None of plain ones, taken to be on all."""
        found: list[float | None] = []
        for grad, parts in zip(gradients.grads, self._parts_of(gradients), strict=True):
            if (mesh := getattr(grad, "device_mesh", None)) is not None:
                found.append(_copies_on(grad.placements, mesh, parts, ranks))  # type: ignore[attr-defined]
            else:
                found.append(None if parts == 1 else ranks / parts)
        return found

    def _weights_of(self, copies: Sequence[float | None], device: torch.device) -> Tensor:
        """Returns two rows of weights: one over the copies of gradients that are spread, and 1 for the others."""
        # Kept: they are the same at every step, and a copy to the device synchronizes.
        known = tuple(copies), device
        if self._weights is None or self._weights[0] != known:
            rows = [[0.0 if each is None else 1.0 / each for each in copies], [float(each is None) for each in copies]]
            self._weights = known, torch.tensor(rows, dtype=torch.float64, device=device)
        return self._weights[1]


@lru_cache  # a model has few placements, and a look at each would cost as much as the arithmetic of a small gradient
def _copies_on(placements: tuple[Any, ...], mesh: Any, parts: int, ranks: int) -> float:
    """Returns on how many of `ranks` each element of a DTensor is."""
    copies = ranks / (mesh.size() * parts)
    for dim, placement in enumerate(placements):
        # Everything else divides the gradient. Not by `is_shard`, which is False for the strided shards of a parameter
        # that is sharded twice along one dimension.
        if placement.is_replicate():
            copies *= mesh.size(dim)
    return copies
