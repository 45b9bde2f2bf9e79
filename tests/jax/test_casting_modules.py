"""Casting of modules of equinox, flax linen and flax nnx: parameters are cast, and other state is not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("equinox")
pytest.importorskip("flax")

import equinox as eqx
from flax import linen, nnx
from tests.jax.test_casting import FULL_HALF_FULL, dtypes

from gradscale.jax.casting import Cast, get_policy


def test_an_equinox_module_is_wrapped_and_trained_in_float32() -> None:
    layer = FULL_HALF_FULL.wrap(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    grads = jax.jit(jax.grad(lambda layer, x: layer(x).sum()))(layer, jnp.ones(3))
    assert isinstance(grads, Cast)
    assert dtypes(jax.tree_util.tree_leaves(grads)) == ["float32", "float32"]


def test_a_layer_inside_a_wrapped_module_can_compute_in_a_type_of_its_own() -> None:
    def summed(layer: Any) -> float:
        model = FULL_HALF_FULL.wrap(eqx.nn.Sequential([eqx.nn.Lambda(jax.nn.relu), eqx.nn.Lambda(layer)]))
        return model(jnp.full(3, 30000.0)).item()

    layer = eqx.tree_at(
        lambda linear: linear.weight, eqx.nn.Linear(3, 1, False, key=jax.random.key(0)), jnp.ones((1, 3))
    )
    assert summed(layer) == jnp.inf
    assert summed(get_policy("c=f32").wrap(layer)) == 90000.0


def test_flax_modules_compute_in_their_own_dtype() -> None:
    dense = linen.Dense(2)
    params = dense.init(jax.random.key(0), jnp.ones(3))
    assert get_policy("c=f16").wrap(dense.apply)(params, jnp.ones(3)).dtype == jnp.float16
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    assert get_policy("c=bf16").wrap(layer)(jnp.ones(3)).dtype == jnp.bfloat16
    assert layer.kernel[...].dtype == jnp.float32


class Norm(nnx.Module):
    """A layer, the statistics of its batches, and a dropout with a random stream."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, dtype=jnp.float16, momentum=0.5, rngs=rngs)
        self.dropout: Any = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(x + 0 * self.linear(x)))


@pytest.mark.parametrize(
    "call", [lambda cast, model, x: cast.wrap(model)(x), lambda cast, model, x: cast.wrap(run)(model, x)]
)
def test_an_nnx_module_keeps_its_statistics_and_its_random_stream(call: Any) -> None:
    model = Norm()
    for number in (1, 2):
        out = call(FULL_HALF_FULL, model, jnp.full((4, 2), 8.0))
        assert out.dtype == jnp.float32
        assert model.norm.mean[...].tolist() == [8.0 - 8.0 * 0.5**number] * 2
        assert int(model.dropout.rngs.count[...]) == number
    assert model.norm.mean[...].dtype == model.linear.kernel[...].dtype == jnp.float32


def run(model: Any, x: Any) -> Any:
    return model(x)


def test_statistics_of_flax_linen_move_by_less_than_half_precision_shows() -> None:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.BatchNorm(use_running_average=False, momentum=1 - 2.0**-12, dtype=jnp.float16)(x)

    variables = Model().init(jax.random.key(0), jnp.ones((2, 2)))
    model = get_policy("c=f16").wrap(Model().apply)
    for _ in range(4):
        _, changed = model(variables, jnp.full((2, 2), 2.0), mutable=["batch_stats"])
        variables = {**variables, **changed}
    (statistics,) = variables["batch_stats"].values()
    assert dtypes(statistics) == {"mean": "float32", "var": "float32"}
    np.testing.assert_allclose(statistics["mean"], 2.0 * (1 - (1 - 2.0**-12) ** 4), rtol=1e-5)
    np.testing.assert_allclose(statistics["var"], (1 - 2.0**-12) ** 4, rtol=1e-6)
