"""The gate around the optimizer: a branch where the step is compiled, a choice where it is not."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tests.jax.helpers import same

from gradscale.jax import Scaler, apply, scaled

TX = optax.adam(0.5)
FINE, HURT = jnp.array([1.0, 2.0]), jnp.array([1.0, jnp.inf])

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def applied(weights: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    opt_state, scaler = state
    grads, scaler, result = scaler.step(grads)
    weights, opt_state = apply(TX, grads, opt_state, weights, result)
    return weights, (opt_state, scaler)


def transformed(weights: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = scaled(TX).update(grads, state, weights)
    return optax.apply_updates(weights, updates), state


WAYS: dict[str, tuple[Step, Callable[[Any], Any]]] = {
    "apply": (applied, lambda weights: (TX.init(weights), Scaler())),
    "scaled": (transformed, scaled(TX).init),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_outside_of_jit_compiles_nothing_once_it_has_run(way: str, caplog: pytest.LogCaptureFixture) -> None:
    step, start = WAYS[way]
    weights, state = step(jnp.ones(2), start(jnp.ones(2)), FINE)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        step(weights, state, HURT)
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_step_has_one_branch(way: str) -> None:
    step, start = WAYS[way]
    program = jax.jit(step).lower(jnp.ones(2), start(jnp.ones(2)), FINE).as_text()
    assert program.count("stablehlo.case") == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_leaves_weights_and_moments_bit_exact(way: str, compiled: bool) -> None:
    step, start = WAYS[way]
    run = jax.jit(step) if compiled else step
    weights, state = run(jnp.ones(2), start(jnp.ones(2)), FINE)
    after, later = run(weights, state, HURT)
    assert same(after, weights)
    moments = [jax.tree.leaves(each, is_leaf=_is_scaler) for each in (state, later)]
    assert same(*([leaf for leaf in leaves if not _is_scaler(leaf)] for leaves in moments))
    assert not same(run(weights, state, FINE)[0], weights)


@pytest.mark.parametrize("way", WAYS)
def test_a_gate_stands_where_each_device_has_weights_of_its_own(way: str) -> None:
    step, start = WAYS[way]
    mesh = jax.make_mesh((8,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))

    def one(weights: Any, grads: Any) -> Any:
        after, state = step(weights, start(weights), grads)
        return after, step(after, state, grads * jnp.inf)[0]

    run = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P("device"), P("device")), out_specs=P("device")))
    after, skipped = run(jnp.ones(16), jnp.arange(1.0, 17.0))
    assert float(jnp.max(after)) < 1.0
    assert same(after, skipped)


def _is_scaler(leaf: Any) -> bool:
    return isinstance(leaf, Scaler)
