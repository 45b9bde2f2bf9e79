"""`scaled`: loss scaling around an optax optimizer, and the nestings it refuses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.jax.helpers import EXACT, INF, NAN, POLICY, base_loss, batch, params, programs, same, spiked

from gradscale import NoScaling, Static
from gradscale.jax import loss_scale, scaled
from gradscale.jax.transformation import ScaledState
from gradscale.policies.headroom import Headroom

INSIDE = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "chain": optax.chain(optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.1), optax.adam(1e-2)),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.0, 5)),
    "hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "masked": optax.masked(optax.adam(1e-2), {"hidden": True, "out": False}),
    "steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
}


def stepper(tx: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    @jax.jit
    def step(weights: Any, opt_state: Any, x: Any, spike: Any) -> Any:
        grads = jax.grad(lambda w: spiked(w, x, spike) * loss_scale(opt_state))(weights)
        updates, opt_state = tx.update(grads, opt_state, weights, loss=base_loss(weights, x))
        return optax.apply_updates(weights, updates), opt_state

    return step


@pytest.mark.parametrize("name", INSIDE)
def test_a_run_with_bad_steps_ends_as_one_without_them(name: str) -> None:
    tx = scaled(INSIDE[name], EXACT)
    step = stepper(tx)

    def run(spikes: list[float]) -> Any:
        weights, good = params(), 0
        opt_state: Any = tx.init(params())
        for spike in spikes:
            weights, opt_state = step(weights, opt_state, batch(good), spike)
            good += spike == 0.0
        return weights, opt_state.inner

    assert same(run([INF, 0.0, 0.0, NAN, 0.0, 0.0]), run([0.0, 0.0, 0.0, 0.0]))


def test_updates_are_those_of_the_optimizer_alone() -> None:
    tx = optax.adam(1e-2)
    ours, theirs = scaled(tx, EXACT), tx
    grads = jax.grad(base_loss)(params(), batch())
    updates, _ = ours.update(jax.tree.map(lambda g: g * 1024.0, grads), ours.init(params()), params())
    assert same(updates, theirs.update(grads, theirs.init(params()), params())[0])


def test_the_scale_changes_and_steps_are_counted() -> None:
    tx = scaled(optax.sgd(0.1), POLICY)
    step, weights, opt_state = stepper(tx), params(), tx.init(params())
    for spike in (0.0, INF, 0.0, 0.0):
        weights, opt_state = step(weights, opt_state, batch(), spike)
    assert float(loss_scale(opt_state)) == 512.0
    assert (int(opt_state.scaler.state.applied), int(opt_state.scaler.state.skipped)) == (3, 1)
    assert programs(step) == 1


def test_a_loss_that_is_not_finite_does_not_move_the_scale() -> None:
    tx = scaled(optax.sgd(0.1), POLICY)
    bad = jax.tree.map(lambda leaf: leaf * NAN, params())
    _, with_loss = tx.update(bad, tx.init(params()), params(), loss=jnp.float32(NAN))
    _, without = tx.update(bad, tx.init(params()), params())
    assert (float(loss_scale(with_loss)), float(loss_scale(without))) == (1024.0, 512.0)


def test_gradients_are_clipped_unscaled() -> None:
    tx = scaled(optax.sgd(1.0), EXACT, clip_norm=2.5)
    updates, _ = tx.update(jnp.array([3072.0, 4096.0]), tx.init(jnp.zeros(2)))
    np.testing.assert_allclose(np.asarray(updates), [-1.5, -2.0], rtol=1e-6)


@pytest.mark.parametrize("wide_state", [False, True])
def test_narrow_parameters_get_wide_moments_where_asked_for(wide_state: bool) -> None:
    tx = scaled(optax.adam(1e-2), EXACT, wide_state=wide_state)
    weights = {"w": jnp.ones(2, jnp.float16)}
    opt_state: Any = tx.init(weights)
    updates, after = jax.jit(tx.update)({"w": jnp.ones(2, jnp.float16)}, opt_state, weights)
    assert opt_state.inner[0].nu["w"].dtype == (jnp.float32 if wide_state else jnp.float16)
    assert updates["w"].dtype == jnp.float16
    assert [leaf.dtype for leaf in jax.tree.leaves(opt_state)] == [leaf.dtype for leaf in jax.tree.leaves(after)]


def test_integer_leaves_stay_whatever_the_weight_decay() -> None:
    tx = scaled(optax.adamw(0.5, weight_decay=0.5), EXACT)
    weights = {"w": jnp.ones(2), "count": jnp.int32(1000)}
    grads = jax.grad(lambda p: jnp.sum(p["w"]) * p["count"], allow_int=True)(weights)
    updates, _ = tx.update(grads, tx.init(weights), weights)
    after: Any = optax.apply_updates(weights, updates)
    assert int(after["count"]) == 1000
    assert float(after["w"][0]) < 1.0


def test_no_scaling_and_no_gradients_are_taken() -> None:
    tx = scaled(optax.sgd(1.0), NoScaling())
    assert tx.update(jnp.float32(2), tx.init(jnp.float32(0)))[0] == -2.0
    empty = scaled(optax.sgd(1.0), POLICY)
    updates, after = empty.update({}, empty.init({}), {})
    assert updates == {}
    assert float(loss_scale(after)) == 1024.0


@pytest.mark.parametrize(
    ("outside", "kind"),
    [
        (lambda tx: optax.chain(tx, optax.add_decayed_weights(0.1)), "tuple"),
        (lambda tx: optax.chain(optax.clip(1.0), tx), "tuple"),
        (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), "MultiStepsState"),
        (lambda tx: optax.masked(tx, {"hidden": True, "out": False}), "MaskedState"),
        (lambda tx: optax.apply_if_finite(tx, 3), "ApplyIfFiniteState"),
    ],
)
def test_a_transformation_around_it_is_refused_when_the_scale_is_asked_for(outside: Any, kind: str) -> None:
    opt_state = outside(scaled(optax.adam(1e-2))).init(params())
    with pytest.raises(ValueError, match=rf"`scaled` must be the outermost.*inside a {kind}\. Write `scaled\(optax"):
        loss_scale(opt_state)


def test_a_state_without_a_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`loss_scale` takes the state of `scaled\(tx\)\.init\(params\)`"):
        loss_scale(optax.adam(1e-2).init(params()))


def test_an_update_of_another_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes the state of `scaled\(tx\)\.init\(params\)`.*Received: tuple"):
        scaled(optax.sgd(0.1)).update(params(), optax.sgd(0.1).init(params()))


def test_one_inside_another_is_refused() -> None:
    with pytest.raises(ValueError, match="`scaled` must not be inside another `scaled`"):
        scaled(optax.chain(scaled(optax.sgd(0.1)), optax.scale(2.0))).init(params())


def test_clipping_one_micro_batch_at_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`clip_norm` would clip each micro-batch.*clip_norm=1\.0\. Clip inside"):
        scaled(INSIDE["steps"], clip_norm=1.0).init(params())


def test_a_bad_bound_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="`clip_norm` must be greater than 0"):
        scaled(optax.sgd(0.1), clip_norm=-1.0)


def test_what_is_no_policy_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"`policy` must be a policy.*Received: policy='fast'"):
        scaled(optax.sgd(0.1), "fast")


def test_the_state_is_a_named_tuple() -> None:
    opt_state = scaled(optax.sgd(0.1)).init(params())
    assert isinstance(opt_state, ScaledState)
    assert opt_state._fields == ("scaler", "inner")
    assert opt_state.scaler.policy == Headroom()


def test_multi_steps_passes_further_arguments_on() -> None:
    accumulating: Any = optax.MultiSteps(optax.polyak_sgd(), 2)
    tx = scaled(accumulating, Static(8.0))
    params = {"w": jnp.float32(1.0)}
    state = tx.init(params)
    updates: Any = None
    for _ in range(2):
        updates, state = tx.update({"w": jnp.float32(8.0)}, state, params, value=jnp.float32(0.5))
    assert updates["w"] == -0.5  # the value over the squared norm, times the gradient
