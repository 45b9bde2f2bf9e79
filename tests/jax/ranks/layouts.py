"""Ways to train the network on four devices: how parameters and rows are spread, and who reduces the gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.jax.ranks.model import POLICY, Batch, alone, cost, optimizer, params

from gradscale.jax import Scaler, apply, value_and_grad

Spread = Literal["data", "fsdp", "tensor", "both", "fsdp and tensor"]

MESHES: dict[Spread, tuple[int, int]] = {
    "data": (4, 1),
    "fsdp": (4, 1),
    "tensor": (1, 4),
    "both": (2, 2),
    "fsdp and tensor": (2, 2),
}
"""Devices along the axes `data` and `model`."""

SPECS: dict[Spread, dict[str, P]] = {
    "data": {"into": P(), "out": P(), "bias": P()},
    "fsdp": {"into": P("data"), "out": P("data"), "bias": P("data")},
    "tensor": {"into": P(None, "model"), "out": P("model"), "bias": P()},
    "both": {"into": P(None, "model"), "out": P("model"), "bias": P()},
    "fsdp and tensor": {"into": P("data", "model"), "out": P("model", "data"), "bias": P("data")},
}

BATCH = Batch(P("data"), P("data"), P(("data", "model")), P(("data", "model")))

Step = Callable[..., tuple[Any, Any, Scaler, Any]]
"""(params, opt_state, scaler, batch) -> params, opt_state, scaler, result."""


@dataclass(frozen=True)
class Options:
    """Arguments of a step: of `value_and_grad`, and of the optimizer."""

    clip_norm: float | None = None
    clip_value: float | None = None
    retries: int = 0


def mesh_of(spread: Spread, kind: AxisType = AxisType.Auto) -> Mesh:
    sizes = MESHES[spread]
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(kind, kind), devices=jax.devices()[:4])


def gathered(weights: Any, spread: Spread) -> Any:
    """Returns whole parameters, or the parts that the axis `model` has, from shards over the axis `data`."""
    if not spread.startswith("fsdp"):
        return weights
    places = {name: list(spec).index("data") for name, spec in SPECS[spread].items()}
    return {name: lax.all_gather(leaf, "data", axis=places[name], tiled=True) for name, leaf in weights.items()}


def local_cost(weights: Any, batch: Batch, spread: Spread) -> Any:
    """Returns the loss of one device."""
    return cost(
        gathered(weights, spread),
        batch.x,
        batch.y,
        batch.bad_losses[0],
        batch.bad_grads[0],
        total=partial(lax.psum, axis_name="model"),
    )


def stepped(gradient: Any, options: Options) -> Step:
    tx = optimizer(options.clip_value)

    def step(weights: Any, opt_state: Any, scaler: Scaler, batch: Batch) -> Any:
        _, grads, scaler, result = gradient(scaler, weights, batch)
        return *apply(tx, grads, opt_state, weights, result), scaler, result

    return step


def state_specs(spread: Spread, options: Options) -> Any:
    """Returns the specs of the optimizer state: those of the parameters for each copy of them."""
    return optimizer_state(options, lambda tree: SPECS[spread])


def optimizer_state(options: Options, of_params: Callable[[Any], Any]) -> Any:
    """Returns the optimizer state with `of_params(trace)` for the sum of all gradients."""
    tx = optimizer(options.clip_value)
    state: Any = tx.init(params())
    structure = jax.tree.structure(params())
    return jax.tree.map(
        lambda node: of_params(node) if jax.tree.structure(node) == structure else P(),
        state,
        is_leaf=lambda node: jax.tree.structure(node) == structure,
    )


def mapped(spread: Spread, options: Options, *, check_vma: bool) -> Step:
    """Returns the step under `shard_map`, on the manual axes `data` and `model`."""

    def loss(weights: Any, batch: Batch) -> Any:
        own = local_cost(weights, batch, spread)
        return lax.pmean(own, ("data", "model")) if check_vma else own

    untracked = {} if check_vma else {"mean_axes": ("data", "model"), "specs": SPECS[spread]}
    gradient = value_and_grad(loss, clip_norm=options.clip_norm, norm=True, retries=options.retries, **untracked)
    state = state_specs(spread, options)
    return jax.jit(
        jax.shard_map(
            stepped(gradient, options),
            mesh=mesh_of(spread),
            in_specs=(SPECS[spread], state, P(), BATCH),
            out_specs=(SPECS[spread], state, P(), P()),
            check_vma=check_vma,
        )
    )


def half_mapped(options: Options) -> Step:
    """Returns the step under a `shard_map` over the axis `data` alone: the compiler spreads over `model`."""

    def loss(weights: Any, batch: Batch) -> Any:
        own = cost(weights, batch.x, batch.y, jnp.sum(batch.bad_losses), jnp.sum(batch.bad_grads))
        return lax.pmean(own, "data")

    gradient = value_and_grad(loss, clip_norm=options.clip_norm, norm=True)
    rows = Batch(P("data"), P("data"), P("data"), P("data"))
    step = jax.shard_map(
        stepped(gradient, options),
        mesh=mesh_of("both"),
        in_specs=(P(), P(), P(), rows),
        out_specs=P(),
        axis_names={"data"},
    )
    return jax.jit(step)


def compiled(options: Options) -> Step:
    """Returns the step under plain `jit`, for arrays that are spread in any way, or on one device."""
    return jax.jit(stepped(value_and_grad(alone, clip_norm=options.clip_norm, norm=True), options))


def pmapped(options: Options) -> Step:
    """Returns the step under `pmap`: everything has an axis of devices in front."""

    def loss(weights: Any, batch: Batch) -> Any:
        return cost(weights, batch.x, batch.y, batch.bad_losses, batch.bad_grads)

    gradient = value_and_grad(loss, clip_norm=options.clip_norm, norm=True, mean_axes="device")
    return jax.pmap(stepped(gradient, options), axis_name="device", devices=jax.devices()[:4])


def start(options: Options) -> tuple[Any, Any, Scaler]:
    """Returns parameters, optimizer state and scaler before the first step, on one device."""
    weights = jax.tree.map(jnp.asarray, params())
    return weights, optimizer(options.clip_value).init(weights), Scaler(POLICY)


def spread_over(mesh: Mesh, spread: Spread, options: Options) -> tuple[tuple[Any, Any, Any], Any]:
    """Returns the shardings of parameters, optimizer state and scaler, and those of a batch."""
    specs = (SPECS[spread], state_specs(spread, options), jax.tree.map(lambda _: P(), Scaler(POLICY)))
    rows = Batch(P("data"), P("data"), P(), P())
    return tuple(
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda node: isinstance(node, P))
        for tree in (specs, rows)
    )
