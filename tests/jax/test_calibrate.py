"""`calibrate` for JAX: gradients of parameters, leaf by leaf."""

import jax.numpy as jnp
import numpy as np
import pytest

from gradscale.histogram import best_static_scale
from gradscale.jax import calibrate


def loss_of(params: dict[str, jnp.ndarray], x: jnp.ndarray) -> jnp.ndarray:
    return jnp.sum(params["a"] * x) + 1e-12 * jnp.sum(params["b"] * x)


def test_every_leaf_is_measured_over_all_batches() -> None:
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    x = np.array([0.5, 0.25, 1e-3], np.float32)
    found = calibrate(loss_of, params, [jnp.asarray(x), jnp.asarray(4 * x)])
    assert found.scale == best_static_scale(np.concatenate([x, 4 * x]))
    assert [layer.name for layer in found.layers] == ["b", "a"]
    assert [layer.name for layer in found.unserved] == ["b"]


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="needs batches and parameters"):
        calibrate(loss_of, {"a": jnp.ones(3), "b": jnp.ones(3)}, [])


def test_half_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"measures in float32.*Received: b of float16\."):
        calibrate(loss_of, {"a": jnp.ones(3), "b": jnp.ones(3, jnp.float16)}, [jnp.ones(3)])


def test_a_batch_with_nan_is_named() -> None:
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="inf or NaN in batch 1, counted from 0, in the gradients of a, b"):
        calibrate(loss_of, params, [jnp.ones(3), jnp.full(3, jnp.nan)])
