"""Casting: which types parameters, arithmetic and results are in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradscale.jax.casting import Policy, cast_to_full, cast_to_half, get_policy, half_dtype

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


def test_scales_of_fp8_layers_are_not_cast() -> None:
    variables = {"params": {"w": jnp.ones(1)}, "_overwrite_with_gradient": {"scale": jnp.float32([1e-9])}}
    seen: list[Any] = []
    get_policy("f16").wrap(lambda variables: seen.append(dtypes(variables)))(variables)
    assert seen == [{"params": {"w": "float16"}, "_overwrite_with_gradient": {"scale": "float32"}}]
