"""Models of flax nnx, flax linen, haiku and equinox: trained by the same two calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("equinox")
pytest.importorskip("flax")
pytest.importorskip("haiku")

import equinox as eqx
import flax.linen as nn
import haiku as hk
from flax import nnx
from flax.errors import TraceContextError
from tests.jax.helpers import INF, POLICY, batch

from gradscale.jax import Scaler, StepResult, apply, loss_scale, scaled, value_and_grad
from gradscale.jax.casting import get_policy

TX = optax.adam(0.05)


def finite(tree: Any) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


class Norm(nnx.Module):
    """A network with statistics of its batches, which are not to be trained."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(jax.nn.relu(self.norm(self.hidden(x)))).astype(jnp.float32)


def test_flax_nnx_trains_and_keeps_its_statistics_on_a_skip() -> None:
    structure, weights, rest = nnx.split(Norm(nnx.Rngs(0)), nnx.Param, ...)

    def cost(weights: Any, rest: Any, x: Any) -> Any:
        model = nnx.merge(structure, weights, rest)
        loss = jnp.mean(jnp.square(model(x) - 1.0))
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    gradient = value_and_grad(cost, has_aux=True, clip_norm=1.0, retries=2)

    @jax.jit
    def step(weights: Any, rest: Any, opt_state: Any, scaler: Scaler, x: Any) -> Any:
        (loss, after), grads, scaler, result = gradient(scaler, weights, rest, x)
        weights, opt_state = apply(TX, grads, opt_state, weights, result)
        return weights, result.select(after, rest), opt_state, scaler, (loss, result)

    opt_state, scaler, losses = TX.init(weights), Scaler(POLICY), []
    for number in range(6):
        x = batch() if number != 3 else batch().at[0, 0].set(INF)
        before = rest
        weights, rest, opt_state, scaler, (loss, result) = step(weights, rest, opt_state, scaler, x)
        assert bool(result.applied) == (number != 3)
        if number == 3:
            assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(rest)))
        else:
            losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert finite((weights, rest, opt_state))


def test_a_whole_nnx_module_can_be_the_argument() -> None:
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    _, grads, _, result = value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(Scaler(POLICY), model, batch())
    expected = nnx.grad(lambda m, x: jnp.mean(m(x) ** 2))(model, batch())
    assert bool(result.applied)
    for grad, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(grad, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "held"),
    [(Norm, r"\['BatchStat'\]"), (lambda rngs: nnx.Dropout(0.5, rngs=rngs), r"\['RngCount', 'RngKey'\]")],
)
def test_an_nnx_module_that_changes_in_a_call_is_refused(kind: Any, held: str) -> None:
    with pytest.raises(TypeError, match=rf"must hold parameters only.*with {held}\. Take it apart.*`nnx\.merge`"):
        value_and_grad(lambda m, x: jnp.mean(m(x)))(Scaler(POLICY), kind(nnx.Rngs(0)), batch())


def test_an_nnx_module_inside_of_an_argument_is_refused_too() -> None:
    with pytest.raises(TypeError, match=r"must hold parameters only.*a Norm with \['BatchStat'\]"):
        value_and_grad(lambda tree, x: jnp.mean(tree["model"](x)))(Scaler(), {"model": Norm(nnx.Rngs(0))}, batch())


def test_a_change_of_an_nnx_module_that_is_not_differentiated_is_not_lost_without_a_word() -> None:
    def cost(weight: Any, model: Any, x: Any, rngs: nnx.Rngs) -> Any:
        return jnp.mean(weight * model(x)) + jax.random.normal(rngs())

    # Before flax 0.12 it is the stream that counts, and not a variable in it.
    counts = "Rng(Count|Stream)"
    for model, changed in ((Norm(nnx.Rngs(0)), "BatchStat"), (nnx.Linear(4, 1, rngs=nnx.Rngs(0)), counts)):
        with pytest.raises(TraceContextError, match=f"Cannot mutate {changed}"):
            value_and_grad(cost)(Scaler(), jnp.float32(1), model, batch(), rngs=nnx.Rngs(0))


@pytest.mark.skipif(not hasattr(nnx, "view"), reason="flax before 0.12 has no nnx.view")
def test_an_nnx_module_that_is_not_differentiated_can_be_called() -> None:
    teacher = nnx.view(Norm(nnx.Rngs(0)), use_running_average=True)
    loss, grads, _, _ = value_and_grad(lambda w, m, x: jnp.mean(w * m(x)))(Scaler(), jnp.float32(2), teacher, batch())
    assert float(grads) == pytest.approx(float(loss) / 2, rel=1e-3)


def test_haiku_trains_in_the_types_of_a_policy() -> None:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(1)(x)))
    half = get_policy("p=f32,c=f16,o=f32").wrap(model.apply)
    assert descends(model.init(jax.random.key(0), batch()), lambda w, x: jnp.mean(jnp.square(half(w, x) - 1.0)))


def test_flax_linen_trains() -> None:
    model = nn.Sequential([nn.Dense(8, dtype=jnp.float16), nn.relu, nn.Dense(1, dtype=jnp.float16)])
    weights = model.init(jax.random.key(0), batch())
    assert descends(weights, lambda w, x: jnp.mean(jnp.square(model.apply(w, x).astype(jnp.float32) - 1.0)))  # pyright: ignore[reportAttributeAccessIssue]


def test_equinox_trains_once_it_is_partitioned() -> None:
    weights, rest = eqx.partition(eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0)), eqx.is_inexact_array)

    def cost(weights: Any, x: Any) -> Any:
        model = eqx.combine(weights, rest)
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16) if eqx.is_inexact_array(leaf) else leaf, model)
        return jnp.mean(jnp.square(jax.vmap(half)(x.astype(jnp.float16)).astype(jnp.float32) - 1.0))

    assert descends(weights, cost)


class Dropped(eqx.Module):
    """A network with leaves that are no arrays: functions, flags, a name, and the rate of a dropout."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    name: str

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.mlp(x))


@pytest.mark.parametrize("way", ["apply", "scaled"])
def test_a_whole_equinox_module_is_trained_as_equinox_does_it(way: str) -> None:
    tx = optax.adamw(0.05, weight_decay=0.5)
    model: Any = Dropped(eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0)), eqx.nn.Dropout(0.0), "net")

    def cost(model: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(jax.vmap(model)(x) - 1.0))

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, scaler: Scaler, x: Any) -> Any:
        _, grads, scaler, result = value_and_grad(cost)(scaler, model, x)
        return *apply(tx, grads, opt_state, model, result), scaler

    @eqx.filter_jit
    def scaled_step(model: Any, opt_state: Any, x: Any) -> Any:
        grads = eqx.filter_grad(lambda m: cost(m, x) * loss_scale(opt_state))(model)
        updates, opt_state = scaled(tx, POLICY).update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state

    expected, state = model, tx.init(eqx.filter(model, eqx.is_array))
    ours, opt_state, scaler = model, tx.init(eqx.filter(model, eqx.is_array)), Scaler(POLICY)
    scaled_state = scaled(tx, POLICY).init(model)
    for number in range(3):
        x = batch(number) if number != 1 else batch() * INF
        if way == "apply":
            ours, opt_state, scaler = step(ours, opt_state, scaler, x)
        else:
            ours, scaled_state = scaled_step(ours, scaled_state, x)
        if number != 1:
            updates, state = tx.update(eqx.filter_grad(cost)(expected, x), state, eqx.filter(expected, eqx.is_array))
            expected = eqx.apply_updates(expected, updates)
    assert (ours.dropout.p, ours.name, ours.mlp.activation) == (0.0, "net", model.mlp.activation)
    for own, other in zip(jax.tree.leaves(ours.mlp.layers), jax.tree.leaves(expected.mlp.layers), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def descends(weights: Any, cost: Any) -> bool:
    """Returns whether five steps lower the loss each, and all parameters stay finite."""
    gradient = value_and_grad(cost, clip_norm=1.0)

    @jax.jit
    def step(weights: Any, opt_state: Any, scaler: Scaler) -> tuple[Any, Any, Scaler, Any, StepResult]:
        loss, grads, scaler, result = gradient(scaler, weights, batch())
        return *apply(TX, grads, opt_state, weights, result), scaler, loss, result

    opt_state, scaler, losses = TX.init(weights), Scaler(POLICY), []
    for _ in range(5):
        weights, opt_state, scaler, loss, result = step(weights, opt_state, scaler)
        losses.append(float(loss))
        assert bool(result.applied)
    return losses == sorted(losses, reverse=True) and finite(weights)
