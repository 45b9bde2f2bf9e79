"""The drop-in for flax's `DynamicScale`: flax beside it, and what is fixed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import serialization
from flax.training import dynamic_scale as flax

from gradscale.jax.flax import DynamicScale, DynamicScaleResult
from gradscale.peers import export_state, import_state


def loss_of(params: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum((params * x) ** 2)


def batches(overflows: list[bool]) -> list[jax.Array]:
    return [jnp.ones(3).at[1].set(jnp.inf if overflow else 1) for overflow in overflows]


def walked(scale: Any, overflows: list[bool]) -> list[tuple[float, int, bool]]:
    """Returns the scale, the count and the flag after each step."""
    found: list[tuple[float, int, bool]] = []
    for x in batches(overflows):
        scale, finite, _, _ = scale.value_and_grad(loss_of)(jnp.ones(3), x)
        found.append((float(scale.scale), int(scale.fin_steps), bool(finite)))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"growth_interval": 2},
        {"growth_interval": 0, "scale": jnp.float32(2.0**126)},
        {"growth_interval": 1, "growth_factor": 3.0, "backoff_factor": 0.3, "minimum_scale": 5.0},
        {"scale": jnp.float32(2.0**-125)},
        {"scale": jnp.float32(2.0**-125), "minimum_scale": None},
        {"growth_interval": 1, "fin_steps": jnp.int32(5)},
    ],
)
def test_the_scale_changes_as_in_flax(settings: dict[str, Any]) -> None:
    overflows = [False] * 6 + [True] * 3 + [False] * 3
    assert walked(DynamicScale(**settings), overflows) == walked(flax.DynamicScale(**settings), overflows)


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("argnums", [0, (0, 1)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_result_is_that_of_flax(has_aux: bool, argnums: Any, dtype: str) -> None:
    def fun(params: jax.Array, x: jax.Array) -> Any:
        loss = jnp.sum((params.astype(dtype) * x.astype(dtype)) ** 2)
        return (loss, {"mean": x.mean()}) if has_aux else loss

    arguments = (jnp.float32([1, 2, 3]), jnp.float32([4, 5, 6]))
    start = {"scale": jnp.float32(64)}
    ours = DynamicScale(**start).value_and_grad(fun, argnums, has_aux)(*arguments)
    peer = flax.DynamicScale(**start).value_and_grad(fun, argnums, has_aux)(*arguments)
    assert isinstance(ours, DynamicScaleResult)
    assert ours._fields == peer._fields
    for mine, other in zip(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(peer), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


def test_the_fields_and_their_defaults_are_those_of_flax() -> None:
    ours, peer = DynamicScale(), flax.DynamicScale()
    assert {name: float(value) for name, value in vars(ours).items()} == {
        name: float(value) for name, value in vars(peer).items()
    }
    assert serialization.to_state_dict(ours) == serialization.to_state_dict(peer)


def test_a_default_scale_compiles_once_where_flax_compiles_twice() -> None:
    def compiled(scale: Any) -> int:
        step: Any = jax.jit(lambda scale: scale.value_and_grad(loss_of)(jnp.ones(3), jnp.ones(3)).dynamic_scale)
        for _ in range(3):
            scale = step(scale)
        return step._cache_size()

    assert compiled(flax.DynamicScale()) == 2
    assert compiled(DynamicScale()) == 1


def test_a_loss_whose_scaled_value_is_infinite_is_returned_as_it_was() -> None:
    def loss(params: jax.Array) -> jax.Array:
        return 2.0**120 + params

    assert float(DynamicScale().value_and_grad(loss)(jnp.float32(0)).aux) == 2.0**120
    assert float(flax.DynamicScale().value_and_grad(loss)(jnp.float32(0)).aux) == np.inf


def test_per_sample_gradients_under_vmap_take_the_next_step_where_flax_fails() -> None:
    def samples(overflow: bool) -> jax.Array:
        return jnp.ones((4, 3)).at[2, 0].set(jnp.inf if overflow else 1)

    def stepped(scale: Any, overflow: bool) -> Any:
        return jax.vmap(scale.value_and_grad(loss_of), in_axes=(None, 0))(jnp.ones(3), samples(overflow))

    with pytest.raises(TypeError, match="scalar-output"):
        stepped(stepped(flax.DynamicScale(), False).dynamic_scale, False)

    scale = DynamicScale(growth_interval=1)
    joint: Any = DynamicScale(growth_interval=1)
    for overflow in (False, False, True, False, False):
        result = stepped(scale, overflow)
        scale = result.dynamic_scale
        joint = joint.value_and_grad(loss_of)(jnp.ones((4, 3)), samples(overflow)).dynamic_scale
        assert result.finite.tolist() == [True, True, not overflow, True]
        assert (scale.scale.min(), scale.fin_steps.min()) == (joint.scale, joint.fin_steps)


def test_rows_that_agree_have_one_scale() -> None:
    def step(x: jax.Array) -> Any:
        return DynamicScale().value_and_grad(loss_of, agree_axis="rows")(jnp.ones(3), x)

    out_axes: Any = DynamicScaleResult(None, None, 0, 0)  # pyright: ignore[reportArgumentType]
    result = jax.vmap(step, axis_name="rows", out_axes=out_axes)(jnp.ones((4, 3)).at[2, 0].set(jnp.inf))
    assert (float(result.dynamic_scale.scale), bool(result.finite)) == (32768.0, False)
    assert result.grad[0].tolist() == [2.0] * 3


def test_averaged_gradients_make_rows_agree_as_in_flax() -> None:
    def averaged(scale: Any) -> Any:
        x = jnp.float32([[1, 2, 3], [3, 2, 1]])
        return jax.vmap(lambda x: scale.value_and_grad(loss_of, axis_name="rows")(jnp.ones(3), x), axis_name="rows")(x)

    ours, peer = averaged(DynamicScale()), averaged(flax.DynamicScale())
    assert ours.grad.tolist() == peer.grad.tolist() == [[10.0, 8.0, 10.0]] * 2


def test_what_is_saved_is_restored_and_goes_on_in_gradscale() -> None:
    scale = DynamicScale(growth_interval=5, scale=jnp.float32(64), fin_steps=jnp.int32(3))
    saved = serialization.to_bytes(scale)
    assert serialization.from_bytes(DynamicScale(growth_interval=5), saved) == scale
    policy, state = import_state("flax", {**serialization.to_state_dict(scale), "growth_interval": 5})
    assert export_state("flax", policy, state) == {"fin_steps": 3, "scale": 64.0}


def test_a_setting_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`backoff_factor` must be positive and finite\. Received"):
        DynamicScale(backoff_factor=0.0).value_and_grad(loss_of)(jnp.ones(3), jnp.ones(3))
