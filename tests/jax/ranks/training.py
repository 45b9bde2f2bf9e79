"""Runs on one device and on four, in one process or in several, and what they end with as whole arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType
from tests.jax.ranks.layouts import (
    Options,
    Spread,
    Step,
    compiled,
    half_mapped,
    mapped,
    mesh_of,
    pmapped,
    spread_over,
    start,
)
from tests.jax.ranks.model import DEVICES, Batch
from tests.jax.versions import set_mesh

Ended = tuple[Any, list[tuple[Any, ...]]]
"""Whole (params, opt_state, scaler) at the end, and of each step (applied, loss_finite, scale, norm)."""

Run = Callable[[Options, list[Batch]], Ended]


def placed(tree: Any, shardings: Any) -> Any:
    """Returns arrays of the host spread over devices, also where a process has only some of them."""
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(
            np.shape(leaf), sharding, lambda index: np.asarray(leaf)[index]
        ),
        tree,
        shardings,
    )


def whole(tree: Any) -> Any:
    """Returns whole numpy arrays; raises if two devices that hold the same part of one hold different bits."""

    def of(leaf: jax.Array) -> Any:
        copies: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            if copies.setdefault(str(shard.index), bits) != bits:
                raise AssertionError(f"{shard.device} has another copy of {leaf.shape} than the others")
        known = leaf.is_fully_addressable or leaf.is_fully_replicated
        return np.asarray(leaf if known else process_allgather(leaf, tiled=True))

    return jax.tree.map(of, tree)


def trained(step: Step, state: Any, data: list[Any]) -> Ended:
    results = []
    for batch in data:
        *state, result = step(*state, batch)
        results.append((result.applied, result.loss_finite, result.scale, result.grad_norm))
    return whole(tuple(state)), [tuple(np.asarray(each) for each in whole(result)) for result in results]


def on_one_device(options: Options, data: list[Batch]) -> Ended:
    return trained(compiled(options), start(options), data)


def under_shard_map(spread: Spread, check_vma: bool, options: Options, data: list[Batch]) -> Ended:
    shardings, _ = spread_over(mesh_of(spread), spread, options)
    return trained(mapped(spread, options, check_vma=check_vma), placed(start(options), shardings), data)


def under_half_a_shard_map(options: Options, data: list[Batch]) -> Ended:
    shardings, _ = spread_over(mesh_of("both"), "both", options)
    return trained(half_mapped(options), placed(start(options), shardings), data)


def under_jit(spread: Spread, kind: AxisType, options: Options, data: list[Batch]) -> Ended:
    mesh = mesh_of(spread, kind)
    shardings, rows = spread_over(mesh, spread, options)
    with set_mesh(mesh):
        state = placed(start(options), shardings)
        return trained(compiled(options), state, [placed(batch, rows) for batch in data])


def _cut(rows: Any) -> Any:
    return rows.reshape(DEVICES, -1, *rows.shape[1:])


def under_pmap(options: Options, data: list[Batch]) -> Ended:
    copies = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * DEVICES), start(options))
    cut = [batch._replace(x=_cut(batch.x), y=_cut(batch.y)) for batch in data]
    state, results = trained(pmapped(options), copies, cut)
    for leaf in jax.tree.leaves((state, results)):
        assert all(row.tobytes() == leaf[0].tobytes() for row in leaf), "devices have different copies"
    return jax.tree.map(lambda leaf: leaf[0], (state, results))


CASES: dict[str, Run] = {
    **{
        f"shard_map, {spread}{'' if check_vma else ', check_vma=False'}": partial(under_shard_map, spread, check_vma)
        for spread in ("data", "fsdp", "tensor", "both", "fsdp and tensor")
        for check_vma in (True, False)
    },
    "shard_map over data, jit over model": under_half_a_shard_map,
    **{f"jit, {spread}": partial(under_jit, spread, AxisType.Auto) for spread in ("data", "fsdp", "tensor", "both")},
    "jit, explicit axes, data": partial(under_jit, "data", AxisType.Explicit),
    "pmap": under_pmap,
}
