"""Leaves of flax's FP8 layers, whose gradients are their next values: never divided, measured, clipped or trained."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

import flax.linen as nn
from flax.core import FrozenDict
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp, fm32
from flax.training.train_state import TrainState
from tests.jax.helpers import EXACT, INF, NAN, same

from gradscale import NoScaling
from gradscale.jax import Scaler, apply, init, loss_scale, scaled, value_and_grad
from gradscale.jax.flax import DynamicScale

TX = optax.adamw(0.1, weight_decay=0.1)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8, dot_general_cls=Fp8DirectDotGeneralOp)(x)


MODEL = Model()
VARIABLES: Any = MODEL.init(jax.random.key(0), X)


def loss_of(variables: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(MODEL.apply(variables, x) - 1.0))  # pyright: ignore[reportOperatorIssue]


@jax.jit
def scaled_gradients(variables: Any, x: Any) -> Any:
    """Returns gradients at the scale of `EXACT`, as JAX makes them."""
    return jax.grad(lambda v: loss_of(v, x) * 1024.0)(variables)


GRADS = scaled_gradients(VARIABLES, X)


def own(tree: Any) -> Any:
    return tree[OVERWRITE_WITH_GRADIENT]


def norm_of(tree: Any) -> float:
    return float(np.sqrt(sum(np.square(np.float64(leaf)).sum() for leaf in jax.tree.leaves(tree))))


@pytest.mark.parametrize("retries", [0, 2])
def test_next_values_leave_value_and_grad_as_they_left_the_backward_pass(retries: int) -> None:
    step = jax.jit(value_and_grad(loss_of, clip_norm=1e-3, retries=retries))
    _, grads, _, result = step(Scaler(EXACT), VARIABLES, X)
    assert same(own(grads), own(GRADS))
    assert not same(own(grads), own(VARIABLES))
    assert norm_of(grads["params"]) == pytest.approx(1e-3, rel=1e-2)
    assert float(result.grad_norm) == pytest.approx(norm_of(GRADS["params"]) / 1024, rel=1e-5)
    assert result.names == ("params.Dense_0.bias", "params.Dense_0.kernel")


def test_next_values_go_through_a_step_by_hand() -> None:
    grads, _, result = Scaler(EXACT).step(GRADS, norm=True)
    assert same(own(grads), own(GRADS))
    assert float(result.grad_norm) == pytest.approx(norm_of(GRADS["params"]) / 1024, rel=1e-5)


def test_an_infinite_amax_is_no_overflow() -> None:
    grads = {**GRADS, OVERWRITE_WITH_GRADIENT: jax.tree.map(lambda leaf: leaf * INF, own(GRADS))}
    after, scaler, result = Scaler(EXACT).step(grads)
    assert bool(result.applied)
    assert int(scaler.state.skipped) == 0
    assert same(own(after), own(grads))


def test_a_skipped_step_keeps_the_present_values() -> None:
    _, grads, _, result = jax.jit(value_and_grad(loss_of))(Scaler(EXACT), VARIABLES, X * NAN)
    assert not bool(result.applied)
    assert same(own(grads), own(VARIABLES))
    grads, _, result = Scaler(EXACT).step(jax.tree.map(lambda leaf: leaf * INF, GRADS))
    after, _ = jax.jit(lambda *args: apply(TX, *args))(grads, init(TX, VARIABLES), VARIABLES, result)
    assert same(after, VARIABLES)


def test_nothing_is_gated_where_nothing_is_checked() -> None:
    _, grads, _, _ = jax.jit(value_and_grad(loss_of))(Scaler(NoScaling()), VARIABLES, X)
    assert same(own(grads)["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"], amax_history(GRADS))


def amax_history(tree: Any) -> Any:
    return own(tree)["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]


STATES = {
    "optax": TX.init,
    "ours": partial(init, TX),
    "flax": lambda variables: TrainState.create(apply_fn=MODEL.apply, params=variables, tx=TX).opt_state,
}


@pytest.mark.parametrize(("made_by", "freeze"), [("optax", dict), ("ours", dict), ("flax", dict), ("flax", FrozenDict)])
def test_apply_overwrites_them_and_trains_the_rest(made_by: str, freeze: Any) -> None:
    @jax.jit
    def step(variables: Any, opt_state: Any, x: Any) -> Any:
        _, grads, _, result = value_and_grad(loss_of)(Scaler(EXACT), variables, x)
        return apply(TX, grads, opt_state, variables, result)

    expected = TrainState.create(apply_fn=MODEL.apply, params=VARIABLES, tx=TX)
    expected = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_of)(state.params, X)))(expected)
    variables, opt_state = step(freeze(VARIABLES), STATES[made_by](freeze(VARIABLES)), X)
    assert isinstance(variables, freeze)
    assert same(own(variables), freeze(own(GRADS)))
    for left, right in zip(*map(jax.tree.leaves, (variables["params"], expected.params["params"])), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    kept, after = step(variables, opt_state, X * NAN)
    assert same((kept, after), (variables, opt_state))


def test_the_update_of_scaled_is_the_next_value() -> None:
    tx = scaled(TX, EXACT)
    update = jax.jit(tx.update)
    opt_state = tx.init(VARIABLES)
    assert float(loss_scale(opt_state)) == 1024.0
    updates, opt_state = update(GRADS, opt_state, VARIABLES)
    alone, _ = TX.update(
        jax.tree.map(lambda leaf: leaf / 1024, GRADS["params"]), STATES["flax"](VARIABLES), VARIABLES["params"]
    )
    assert same(own(updates), own(GRADS))
    for left, right in zip(*map(jax.tree.leaves, (updates["params"], alone)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    skipped, after = update(jax.tree.map(lambda leaf: leaf * INF, GRADS), opt_state, VARIABLES)
    assert same(own(skipped), own(VARIABLES))
    assert norm_of(skipped["params"]) == 0.0
    assert same(after.inner, opt_state.inner)  # pyright: ignore[reportAttributeAccessIssue]


def test_flax_trains_with_scaled_inside_its_state() -> None:
    state = TrainState.create(apply_fn=MODEL.apply, params=VARIABLES, tx=scaled(TX, EXACT))
    after = state.apply_gradients(grads=GRADS)
    assert same(own(after.params), own(GRADS))


def test_the_drop_in_for_flax_returns_them_as_they_are() -> None:
    scale = DynamicScale(scale=jnp.float32(1024))
    _, finite, _, grads = jax.jit(lambda v: scale.value_and_grad(loss_of)(v, X))(VARIABLES)
    assert bool(finite)
    assert same(own(grads), own(GRADS))
    assert norm_of(grads["params"]) == pytest.approx(norm_of(GRADS["params"]) / 1024, rel=1e-5)


def test_devices_that_average_gradients_take_the_largest_amax() -> None:
    xs = jnp.stack([jnp.asarray(X), 2 * jnp.asarray(X)])

    def step(x: Any) -> Any:
        return value_and_grad(loss_of, mean_axes="row", axis_names="row")(Scaler(EXACT), VARIABLES, x)[1]

    def drop_in(x: Any) -> Any:
        return DynamicScale().value_and_grad(loss_of, axis_name="row")(VARIABLES, x).grad

    for run in (step, drop_in):
        grads = jax.jit(jax.vmap(run, axis_name="row"))(xs)
        assert amax_history(grads)[:, 0].tolist() == [2 * np.abs(X).max()] * 2
        assert amax_history(grads).shape == (2, 1024)


def test_the_type_that_flax_adds_by_their_maximum_is_passed_through() -> None:
    @jax.custom_vjp
    def watched(x: Any, amax: Any) -> Any:
        return x

    def backward(x: Any, cotangent: Any) -> Any:
        return cotangent, jax.lax.convert_element_type(jnp.max(jnp.abs(x)), fm32)

    watched.defvjp(lambda x, amax: (x, x), backward)

    @jax.jit
    def step(w: Any, amax: Any) -> Any:
        variables = {"w": w, OVERWRITE_WITH_GRADIENT: {"amax": jax.lax.convert_element_type(amax, fm32)}}
        _, grads, _, result = value_and_grad(lambda v: jnp.sum(watched(v["w"] * 3, own(v)["amax"])))(
            Scaler(EXACT), variables
        )
        return grads["w"], jax.lax.convert_element_type(own(grads)["amax"], jnp.float32), result.applied

    grad, amax, applied = step(jnp.float32([1.0, -2.0]), jnp.float32(0))
    assert (grad.tolist(), float(amax), bool(applied)) == ([3.0, 3.0], 6.0, True)
