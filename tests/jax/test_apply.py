"""`apply`: parameters and optimizer state move together or not at all."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.jax.helpers import EXACT, INF, NAN, POLICY, batch, params, same, spiked, trainer

from gradscale import NoScaling
from gradscale.jax import Scaler, apply, init, scaled, value_and_grad
from gradscale.jax.apply import Gate

OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.0, 5)),
    "hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_bad_steps_ends_as_one_without_them(name: str) -> None:
    tx = OPTIMIZERS[name]
    gradient = value_and_grad(spiked)

    @jax.jit
    def step(weights: Any, opt_state: Any, scaler: Scaler, x: Any, spike: Any) -> Any:
        value, grads, scaler, result = gradient(scaler, weights, x, spike)
        return *apply(tx, grads, opt_state, weights, result, value=value), scaler

    def run(spikes: list[float]) -> Any:
        weights, opt_state, scaler, good = params(), tx.init(params()), Scaler(EXACT), 0
        for spike in spikes:
            weights, opt_state, scaler = step(weights, opt_state, scaler, batch(good), spike)
            good += spike == 0.0
        return weights, opt_state

    assert same(run([INF, 0.0, 0.0, NAN, 0.0, 0.0]), run([0.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("gate", ["cond", "where"])
@pytest.mark.parametrize("spike", [0.0, INF])
def test_both_gates_give_the_same_update(gate: Gate, spike: float) -> None:
    tx = optax.adam(1e-2)
    _, grads, _, result = jax.jit(value_and_grad(spiked))(Scaler(POLICY), params(), batch(), spike)
    after, state = jax.jit(lambda g, r: apply(tx, g, tx.init(params()), params(), r, gate=gate))(grads, result)
    assert int(state[0].count) == (spike == 0.0)
    assert same(after, params()) == (spike == INF)


def test_the_gate_is_not_built_where_nothing_is_checked() -> None:
    tx = optax.sgd(0.1)

    def step(weights: Any, scaler: Scaler) -> Any:
        _, grads, scaler, result = value_and_grad(spiked)(scaler, weights, batch(), 0.0)
        return apply(tx, grads, tx.init(weights), weights, result)

    programs = [jax.jit(step).lower(params(), Scaler(policy)).as_text() for policy in (NoScaling(), POLICY)]
    assert ["stablehlo.case" in program for program in programs] == [False, True]


def test_integer_leaves_stay_whatever_the_weight_decay() -> None:
    tx = optax.adamw(0.5, weight_decay=0.5)
    tree = {"w": jnp.ones(2), "count": jnp.int32(1000), "flag": jnp.bool_(True)}
    step = trainer(tx, lambda p: jnp.sum(p["w"]))
    after, opt_state, _, _ = step(tree, tx.init(tree), Scaler(EXACT))
    assert (int(after["count"]), bool(after["flag"])) == (1000, True)
    alone, _, _, _ = step({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}), Scaler(EXACT))
    assert same(after["w"], alone["w"])
    assert jax.tree.map(lambda leaf: leaf.dtype, opt_state) == jax.tree.map(lambda leaf: leaf.dtype, tx.init(tree))


@pytest.mark.parametrize("gate", ["cond", "where"])
def test_random_keys_stay(gate: Gate) -> None:
    tx = optax.adamw(0.5)
    tree = {"w": jnp.ones(2), "key": jax.random.key(7)}
    _, grads, _, result = value_and_grad(lambda p: jnp.sum(p["w"]))(Scaler(EXACT), tree)
    after, _ = jax.jit(partial(apply, tx, gate=gate))(grads, init(tx, tree), tree, result)
    assert after["key"] == tree["key"]
    assert float(after["w"][0]) < 1.0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_parameters_get_wide_moments_from_init(dtype: Any) -> None:
    tx = optax.adam(1e-2)
    tree = {"w": jnp.ones(4, dtype)}
    opt_state = init(tx, tree)
    assert opt_state[0].mu["w"].dtype == jnp.float32
    after, _, _, _ = trainer(tx, lambda p: jnp.mean(p["w"].astype(jnp.float32) ** 2))(tree, opt_state, Scaler(EXACT))
    assert after["w"].dtype == dtype
    assert float(after["w"][0]) < 1.0


def test_narrow_moments_are_refused() -> None:
    tx = optax.adam(1e-2)
    tree = {"w": jnp.ones(4, jnp.float16)}
    with pytest.raises(TypeError, match=r"keep the type of its state.*float16 state that becomes float32.*init\(tx"):
        trainer(tx, lambda p: jnp.mean(p["w"].astype(jnp.float32)))(tree, tx.init(tree), Scaler(EXACT))


@pytest.mark.filterwarnings("error:Some donated buffers were not usable")
def test_everything_can_be_donated() -> None:
    tx = optax.adam(1e-2)
    gradient = value_and_grad(spiked, clip_norm=1.0)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(weights: Any, opt_state: Any, scaler: Scaler, spike: Any) -> Any:
        _, grads, scaler, result = gradient(scaler, weights, batch(), spike)
        return *apply(tx, grads, opt_state, weights, result), scaler

    weights, opt_state, scaler = params(), tx.init(params()), Scaler(POLICY)
    for spike in (0.0, INF, 0.0):
        weights, opt_state, scaler = step(weights, opt_state, scaler, spike)
    assert (int(scaler.state.applied), int(scaler.state.skipped)) == (2, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(weights))


def test_lookahead_takes_gradients_of_its_fast_parameters() -> None:
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    step = jax.jit(lambda grads, state, both, result: apply(tx, grads, state, both, result))

    def run(spikes: list[float]) -> Any:
        both = optax.LookaheadParams.init_synced(params())
        opt_state, scaler = init(tx, both), Scaler(EXACT)
        for spike in spikes:
            _, grads, scaler, result = value_and_grad(spiked)(scaler, both.fast, batch(), spike)
            both, opt_state = step(grads, opt_state, both, result)
        return both, opt_state

    both, opt_state = run([0.0, INF, 0.0])
    assert same((both, opt_state), run([0.0, 0.0]))
    assert not same(both.slow, params())


def test_a_whole_run_fits_into_a_scan() -> None:
    tx = optax.sgd(0.1)
    gradient = value_and_grad(spiked)

    def step(carry: Any, spike: Any) -> Any:
        weights, opt_state, scaler = carry
        _, grads, scaler, result = gradient(scaler, weights, batch(), spike)
        return (*apply(tx, grads, opt_state, weights, result), scaler), result

    start = (params(), tx.init(params()), Scaler(POLICY))
    (_, _, scaler), results = jax.lax.scan(step, start, jnp.array([0.0, INF, 0.0, NAN]))
    assert results.applied.tolist() == [True, False, True, False]
    assert results.scale.tolist() == [1024.0, 1024.0, 512.0, 512.0]
    assert float(scaler.loss_scale) == 256.0


def test_a_scaled_transformation_is_refused() -> None:
    tx = scaled(optax.sgd(0.1))
    _, grads, _, result = jax.jit(value_and_grad(spiked))(Scaler(), params(), batch(), 0.0)
    with pytest.raises(ValueError, match=r"`apply` takes a plain optax transformation.*Give `tx` itself"):
        apply(tx, grads, tx.init(params()), params(), result)


def test_clipping_one_micro_batch_at_a_time_is_refused() -> None:
    tx = OPTIMIZERS["steps"]
    _, grads, _, result = jax.jit(value_and_grad(spiked, clip_norm=1.0))(Scaler(), params(), batch(), 0.0)
    with pytest.raises(ValueError, match=r"`clip_norm` would clip each micro-batch alone.*clip_norm=1\.0"):
        apply(tx, grads, tx.init(params()), params(), result)


def test_a_gate_of_another_kind_is_refused() -> None:
    _, grads, _, result = jax.jit(value_and_grad(spiked))(Scaler(), params(), batch(), 0.0)
    with pytest.raises(ValueError, match=r"`gate` must be 'cond' or 'where'\. Received: gate='if'"):
        apply(optax.sgd(0.1), grads, (), params(), result, gate="if")  # pyright: ignore[reportArgumentType]


def test_gradients_of_other_parameters_are_refused() -> None:
    grads, _, result = Scaler(EXACT).step({"w": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"same structure as the parameters.*'b': \*.*and parameters.*Give what was"):
        apply(optax.sgd(0.1), grads, optax.sgd(0.1).init({"w": jnp.ones(2)}), {"w": jnp.ones(2)}, result)


def test_gradients_of_another_shape_are_refused() -> None:
    tx = optax.adam(0.1)
    _, grads, _, result = value_and_grad(lambda w: jnp.sum(w))(Scaler(EXACT), jnp.ones(1))
    with pytest.raises(ValueError, match=r"Received: shape \(1,\) for one of shape \(3,\)"):
        apply(tx, grads, tx.init(jnp.ones(3)), jnp.ones(3), result)


def test_a_result_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`result` must be what `value_and_grad`.*Received: Scaler\. Write `apply"):
        apply(optax.sgd(0.1), {}, (), {}, Scaler())  # pyright: ignore[reportArgumentType]
