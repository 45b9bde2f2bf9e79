"""Who holds which gradient: on how many ranks each element of it is, so that a sum over ranks counts it once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.torch.ranks.groups import ALONE
from gradscale.torch.step.gradients import Gradients

Distinct = Any
"""A process group, or a mapping of modules and parameters to process groups."""


class Placements:
    """How gradients are spread over the ranks that decide together.

    A plain tensor is taken to be the same on all of them, as under DDP, unless it is named as distinct. A DTensor says
    itself how it is spread over its mesh; ranks outside of the mesh are taken to hold the same, in meshes of their own,
    unless it is named. FSDP1 keeps shards in plain tensors, which its modules tell.
    """

    def __init__(self, modules: Sequence[nn.Module], distinct: Distinct = None) -> None:
        self._modules = modules
        self._distinct = distinct
        self._parts: dict[int, int] | None = None
        self._copies_of: dict[Any, float] = {}
        self._weights: tuple[Any, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy: what is looked up in the model is looked up again."""
        return {**self.__dict__, "_parts": None, "_copies_of": {}, "_weights": None}

    def squares(self, gradients: Gradients, norms: Tensor, group: Any) -> tuple[Tensor, Tensor, bool]:
        """Returns two sums of squared norms, and whether the second has any gradient.

        The first is over gradients that are spread over the ranks of `group`, each divided by its copies; the second
        over those that are the same on every rank. Does not synchronize with the device, except at the first step.
        """
        copies = self._all_copies(gradients, group)
        spread, same = (self._weights_of(copies, norms.device) @ norms.double().square()).unbind()
        return spread, same, None in copies

    def weights(self, gradients: Gradients, group: Any) -> list[float]:
        """Returns, for each gradient, 1 over the number of ranks of `group` that hold the same elements of it."""
        ranks = dist.get_world_size(group)
        return [1.0 / (copies or ranks) for copies in self._all_copies(gradients, group)]

    def has_smaller_mesh(self, gradients: Gradients, ranks: int) -> bool:
        """Returns whether a gradient is on a mesh of fewer than `ranks` ranks."""
        if gradients.values is gradients.grads:
            return False
        meshes = (getattr(grad, "device_mesh", None) for grad in gradients.grads)
        return any(mesh is not None and mesh.size() < ranks for mesh in meshes)

    def by_smaller_mesh(self, gradients: Gradients, norms: Tensor, group: Any) -> dict[tuple[int, ...], float]:
        """Returns sums of squared norms, by the ranks of the mesh, for meshes that are smaller than `group`.

        Such a mesh is taken to be one of several that hold the same, unless its parameters are named as distinct.
        Synchronizes with the device.
        """
        found: dict[tuple[int, ...], float] = {}
        parts, ranks = self._known_parts(), dist.get_world_size(group)
        rows = zip(gradients.parameters, gradients.grads, norms.double().square().tolist(), strict=True)
        for parameter, grad, square in rows:
            mesh = getattr(grad, "device_mesh", None)
            if mesh is None or mesh.size() >= ranks or parts.get(id(parameter), self._everywhere) > 1:
                continue
            members = tuple(mesh.mesh.flatten().tolist())
            copies = self._copies(grad, 1, ranks, group)
            found[members] = found.get(members, 0.0) + square / cast(float, copies) * ranks / mesh.size()
        return found

    def all_same(self, gradients: Gradients) -> bool:
        """Returns whether all gradients are taken to be the same on every rank."""
        # `values` is `grads` itself if all are plain and dense.
        return gradients.values is gradients.grads and self._everywhere == 1 and not self._known_parts()

    @property
    def _everywhere(self) -> int:
        """Over how many ranks every parameter is distinct."""
        return 1 if self._distinct is None or isinstance(self._distinct, Mapping) else _size(self._distinct)

    def _known_parts(self) -> Mapping[int, int]:
        """Returns over how many ranks single parameters are distinct, by their id."""
        if self._parts is None:
            # Once: process groups and wrappers are made before the first step.
            self._parts = dict(_flat_shards(self._modules)) | dict(_named(self._distinct))
        return self._parts

    def _all_copies(self, gradients: Gradients, group: Any) -> list[float | None]:
        parts, everywhere, ranks = self._known_parts(), self._everywhere, dist.get_world_size(group)
        return [
            self._copies(grad, parts.get(id(parameter), everywhere), ranks, group)
            for parameter, grad in zip(gradients.parameters, gradients.grads, strict=True)
        ]

    def _copies(self, grad: Tensor, parts: int, ranks: int, group: Any) -> float | None:
        placements = getattr(grad, "placements", None)
        if placements is None:
            return None if parts == 1 else ranks / parts
        # Kept: a model has few placements, and a look at each would cost as much as the arithmetic of a small gradient.
        known = placements, grad.device_mesh, parts, ranks  # type: ignore[attr-defined]
        if known not in self._copies_of:
            self._copies_of[known] = _copies_on(*known, group)
        return self._copies_of[known]

    def _weights_of(self, copies: Sequence[float | None], device: torch.device) -> Tensor:
        """Returns two rows of weights: one over the copies of gradients that are spread, and 1 for the others."""
        # Kept: they are the same at every step, and a copy to the device synchronizes.
        known = tuple(copies), device
        if self._weights is None or self._weights[0] != known:
            rows = [[0.0 if each is None else 1.0 / each for each in copies], [float(each is None) for each in copies]]
            self._weights = known, torch.tensor(rows, dtype=torch.float64, device=device)
        return self._weights[1]


def _copies_on(placements: Sequence[Any], mesh: Any, parts: int, ranks: int, group: Any) -> float:
    """Returns on how many of `ranks` each element of a DTensor is, or raises if shards of it are on others."""
    check_mesh(mesh, group)
    copies = ranks / (mesh.size() * parts)
    for dim, placement in enumerate(placements):
        # Everything else divides the gradient. Not by `is_shard`, which is False for the strided shards of a parameter
        # that is sharded twice along one dimension.
        if placement.is_replicate():
            copies *= mesh.size(dim)
    return copies


def _size(group: Any) -> int:
    """Returns how many ranks a process group, or a mesh, has."""
    return group.size() if hasattr(group, "mesh_dim_names") else dist.get_world_size(group)


def _named(distinct: Distinct) -> Iterable[tuple[int, int]]:
    """Yields the parameters of a mapping, by their id, and over how many ranks each is distinct."""
    for owner, group in distinct.items() if isinstance(distinct, Mapping) else ():
        for parameter in owner.parameters() if isinstance(owner, nn.Module) else [owner]:
            yield id(parameter), _size(group)


def _flat_shards(modules: Sequence[nn.Module]) -> Iterable[tuple[int, int]]:
    """Yields the parameters that FSDP1 keeps in shards, by their id, and over how many ranks each is divided."""
    for module in (inner for root in modules for inner in root.modules()):
        handle = getattr(module, "_handle", None)
        if getattr(handle, "uses_sharded_strategy", False):
            flat = handle.flat_param  # type: ignore[union-attr]
            for parameter in [flat, *(getattr(flat, "_params", None) or ())]:
                yield id(parameter), dist.get_world_size(handle.process_group)  # type: ignore[union-attr]


def check_mesh(mesh: Any, group: Any) -> None:
    """Raises if some ranks of a mesh are not in `group`: they would decide on their shards by themselves."""
    inside = {dist.get_rank()} if group == ALONE else set(dist.get_process_group_ranks(group or dist.group.WORLD))
    missing = sorted(set(mesh.mesh.flatten().tolist()) - inside)
    if missing:
        raise ValueError(
            "The ranks that decide together must be all that hold shards of a parameter. Received: a group of ranks "
            f"{sorted(inside)}, and a parameter that is also on ranks {missing}. Pass a larger `group`, or leave it "
            "out for every rank."
        )
