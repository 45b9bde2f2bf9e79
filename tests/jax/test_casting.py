"""Casting: which types parameters, arithmetic and results are in."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from gradscale.jax.casting import Cast, Policy, cast_to_full, cast_to_half, get_policy, half_dtype

FULL_HALF_FULL = Policy(jnp.float32, jnp.float16, jnp.float32)


def dtypes(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: leaf.dtype.name, tree)


def test_each_place_has_its_type() -> None:
    policy = Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    tree = {"a": jnp.ones(2), "b": [np.ones(3, np.float16)]}
    assert dtypes(policy.cast_to_param(tree)) == {"a": "float32", "b": ["float32"]}
    assert dtypes(policy.cast_to_compute(tree)) == {"a": "float16", "b": ["float16"]}
    assert dtypes(policy.cast_to_output(tree)) == {"a": "bfloat16", "b": ["bfloat16"]}


@pytest.mark.parametrize(
    "leaf",
    [jnp.int32(3), np.bool_(True), jnp.complex64(1j), jax.random.key(0), 2.5, "name", None],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_array_of_floats_is_left_alone(leaf: Any) -> None:
    assert FULL_HALF_FULL.cast_to_compute([leaf])[0] is leaf


def test_a_numpy_scalar_is_cast_like_an_array() -> None:
    assert FULL_HALF_FULL.cast_to_compute(np.float32(1)).dtype == np.float16


def test_full_and_half_cast_everything() -> None:
    assert dtypes(cast_to_full([jnp.ones(1, jnp.bfloat16), jnp.ones(1)])) == ["float32", "float32"]
    assert dtypes(cast_to_half([jnp.ones(1, jnp.bfloat16), jnp.ones(1)])) == [half_dtype().name] * 2


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("f16", "p=f16,c=f16,o=f16"),
        ("c=half", "p=full,c=f16,o=f16"),
        ("p=bf16", "p=bf16,c=bf16,o=bf16"),
        ("params=full, compute=bfloat16, output=f64", "p=full,c=bf16,o=f64"),
        ("o=full,c=f16", "p=full,c=f16,o=full"),
    ],
)
def test_a_text_names_the_types_that_it_says_and_fills_in_the_others(text: str, written: str) -> None:
    policy = get_policy(text)
    assert str(policy) == written
    assert get_policy(written) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c=f17", r"Unknown dtype: it must be one of half, bf16, .*\. Received: 'f17'\."),
        ("", r"Received: ''\."),
        ("d=f16", r"`text` must say params, compute and output, each at most once\. Received: 'd=f16'\."),
        ("c=f16,compute=f32", r"each at most once\. Received: 'c=f16,compute=f32'\."),
    ],
)
def test_a_text_that_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_policy(text)


@pytest.mark.parametrize("dtype", [jnp.int32, None, jnp.complex64])
def test_a_type_that_is_not_of_floats_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"`compute_dtype` must be a floating-point type.* Received: compute_dtype="):
        Policy(jnp.float32, dtype, jnp.float32)


def test_the_output_type_can_be_replaced() -> None:
    assert FULL_HALF_FULL.with_output_dtype("bfloat16") == Policy(jnp.float32, jnp.float16, jnp.bfloat16)


def test_a_policy_goes_through_jit_as_a_static_argument() -> None:
    assert jax.jit(lambda policy, x: policy.cast_to_compute(x))(FULL_HALF_FULL, jnp.ones(2)).dtype == jnp.float16


def test_a_wrapped_function_computes_in_one_type_and_returns_in_another() -> None:
    seen: list[str] = []

    def product(weight: jax.Array, *, x: jax.Array) -> jax.Array:
        seen.extend((weight.dtype.name, x.dtype.name))
        return weight @ x

    assert FULL_HALF_FULL.wrap(product)(jnp.ones(3), x=jnp.ones(3)).dtype == jnp.float32
    assert seen == ["float16", "float16"]


def test_gradients_of_cast_parameters_are_float32() -> None:
    loss = FULL_HALF_FULL.wrap(lambda weight, x: (weight @ x) ** 2)
    grad = jax.grad(loss)(jnp.ones(3), jnp.ones(3))
    assert grad.dtype == jnp.float32
    assert grad.tolist() == [6.0] * 3


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


def test_scales_of_fp8_layers_are_not_cast() -> None:
    variables = {"params": {"w": jnp.ones(1)}, "_overwrite_with_gradient": {"scale": jnp.float32([1e-9])}}
    seen: list[Any] = []
    get_policy("f16").wrap(lambda variables: seen.append(dtypes(variables)))(variables)
    assert seen == [{"params": {"w": "float16"}, "_overwrite_with_gradient": {"scale": "float32"}}]
