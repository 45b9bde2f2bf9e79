"""Gradients in shards, as FSDP2 keeps them: each rank reads its part, and sizes are of the whole."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.torch.step.measure import Measured


@torch.no_grad()
def joined(measured: Measured, grads: Sequence[Tensor], *, norm: bool) -> Measured:
    """Returns the sizes of whole gradients from those of the parts that this rank holds. Does not wait for the device.

    One small all-reduce for each way in which gradients are cut. Every rank must come here.

    Args:
        measured: the sizes of the parts.
        grads: the gradients, distributed or not.
        norm: whether the sizes are norms; else largest magnitudes.
    """
    cut = _cut_by(grads)
    if not cut:
        return measured
    sizes = measured.sizes.square() if norm else measured.sizes.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group, positions in cut:
        part = sizes[positions]
        dist.all_reduce(part, dist.ReduceOp.SUM if norm else dist.ReduceOp.MAX, group=group)
        sizes[positions] = part
    sizes = sizes.sqrt() if norm else sizes
    return Measured(sizes, torch.linalg.vector_norm(sizes) if norm else sizes.amax(), measured.half)


def _cut_by(grads: Sequence[Tensor]) -> list[tuple[Any, list[int]]]:
    """Returns the groups of ranks that share gradients among them, each with the positions of these gradients."""
    found: dict[tuple[Any, int], list[int]] = {}
    for position, grad in enumerate(grads):
        for dim, placement in enumerate(getattr(grad, "placements", ())):
            if placement.is_shard():
                found.setdefault((grad.device_mesh, dim), []).append(position)  # type: ignore[attr-defined]
    return [(mesh.get_group(dim), positions) for (mesh, dim), positions in found.items()]
