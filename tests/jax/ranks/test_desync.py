"""A scale that differs between devices that share it: refused where JAX's types show it, else found in the step."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradscale import Dynamic
from gradscale.jax import ScaleDesync, Scaler, apply, scaled, value_and_grad

DEVICES = 4

POLICY = Dynamic(init_scale=1024.0, min_scale=512.0)

ROWS = np.arange(8, dtype=np.float32)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


def with_scales(scales: list[float]) -> Scaler:
    """Returns a stack of scalers, one for each device, with these scales."""
    scaler = jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), Scaler(POLICY))
    return scaler.with_state(replace(scaler.state, scale=jnp.array(scales)))


def first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def stacked(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def parted() -> Scaler:
    return with_scales([1024.0, 512.0, 1024.0, 1024.0])


@pytest.mark.parametrize("axis_names", [None, ()], ids=["shared", "independent"])
def test_a_scale_that_varies_over_devices_with_one_loss_is_refused(mesh: Any, axis_names: Any) -> None:
    def local(scalers: Scaler, x: Any) -> Any:
        gradient = value_and_grad(lambda w: lax.pmean(jnp.sum(w * x), "data"), axis_names=axis_names)
        return gradient(first(scalers), jnp.ones(2))[1]

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"A scale must be the same on all devices.*varies over \['data'\].*Pass the"):
        jax.eval_shape(step, parted(), ROWS)


def test_a_scale_that_varies_over_devices_whose_gradients_are_summed_is_refused(mesh: Any) -> None:
    def local(scalers: Scaler, weight: Any, x: Any) -> Any:
        return value_and_grad(lambda w: jnp.sum(w * x), axis_names=())(first(scalers), weight)[1]

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"A scale must be the same on all devices.*varies over \['data'\]"):
        jax.eval_shape(step, parted(), jnp.ones(2), ROWS)


def test_gradients_of_one_scale_for_all_are_not_divided_by_one_that_varies(mesh: Any) -> None:
    def local(scalers: Scaler, grad: Any) -> Any:
        return first(scalers).step(grad)[0]

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"A scale must be the same on all devices.*varies over \['data'\]"):
        jax.eval_shape(step, parted(), jnp.ones(2))


def test_devices_that_share_nothing_may_have_scales_of_their_own(mesh: Any) -> None:
    def local(scalers: Scaler, weight: Any) -> Any:
        _, grads, scaler, _ = value_and_grad(lambda w: jnp.sum(w**2), axis_names=())(first(scalers), weight)
        return grads, stacked(scaler)

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data")))
    grads, scaler = step(parted(), ROWS)
    assert grads.tolist() == (2 * ROWS).tolist()
    assert scaler.loss_scale.tolist() == parted().loss_scale.tolist()


def trained(mapped: str, mesh: Any, scalers: Scaler, **options: Any) -> tuple[Any, Any, Scaler, Any]:
    """Returns weights, optimizer state, scaler and result of one step on four devices, each in a stack."""
    tx = optax.adam(0.5)
    weights = jnp.ones(2)

    def local(scaler: Scaler, x: Any) -> Any:
        gradient = value_and_grad(lambda w: jnp.sum(w * x), mean_axes="data", **options)
        _, grads, scaler, result = gradient(scaler, weights)
        return *apply(tx, grads, tx.init(weights), weights, result), scaler, result

    if mapped == "pmap":
        return jax.pmap(local, axis_name="data", devices=jax.devices()[:DEVICES])(scalers, ROWS.reshape(DEVICES, 2))
    return jax.jit(
        jax.shard_map(
            lambda scalers, x: stacked(local(first(scalers), x)),
            mesh=mesh,
            in_specs=(P("data"), P("data")),
            out_specs=P("data"),
            check_vma=False,
        )
    )(scalers, ROWS)


@pytest.mark.parametrize("mapped", ["pmap", "shard_map"])
def test_a_step_of_scales_that_differ_is_skipped_on_all_devices_and_reported(mapped: str, mesh: Any) -> None:
    weights, opt_state, scaler, result = trained(mapped, mesh, parted())
    assert weights.tolist() == [[1.0, 1.0]] * DEVICES
    assert not np.asarray(opt_state[0].mu).any()
    assert result.applied.tolist() == [False] * DEVICES
    assert scaler.loss_scale.tolist() == parted().loss_scale.tolist()
    for look in (first(result).skipped, first(result).status, lambda: first(scaler).check(first(result))):
        with pytest.raises(ScaleDesync, match=r"must be the same on all devices.*from 512 to 1024.*Start all devices"):
            look()


def test_scales_that_are_the_same_are_not_reported(mesh: Any) -> None:
    weights, _, scaler, result = trained("shard_map", mesh, with_scales([1024.0] * DEVICES))
    assert result.applied.tolist() == [True] * DEVICES
    np.testing.assert_allclose(weights, [[0.5, 0.5]] * DEVICES, rtol=1e-5)
    first(scaler).check(first(result))


def test_devices_with_scales_that_differ_leave_the_retries_together(mesh: Any) -> None:
    # The second device is at its lowest scale and may not retry. The others must not wait for it in an all-reduce.
    scalers = with_scales([2.0**127, 512.0, 2.0**127, 2.0**127])
    _, _, _, result = trained("shard_map", mesh, scalers, retries=5)
    assert result.applied.tolist() == [False] * DEVICES
    assert result.retries.tolist() == [0] * DEVICES


def test_the_optax_transformation_skips_when_scales_differ(mesh: Any) -> None:
    tx = scaled(optax.sgd(1.0), POLICY)

    def local(scalers: Scaler, grad: Any) -> Any:
        state: Any = tx.init(grad)
        return tx.update(lax.pmean(grad, "data"), state._replace(scaler=first(scalers)))[0]

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False)
    assert not np.asarray(jax.jit(step)(parted(), ROWS)).any()


def test_comparing_scales_takes_no_collective_of_its_own(mesh: Any) -> None:
    def collectives(policy: Any) -> int:
        step = jax.shard_map(lambda scaler, grad: scaler.step(grad)[0], mesh=mesh, in_specs=(P(), P()), out_specs=P())
        program = str(jax.make_jaxpr(step)(Scaler(policy), jnp.ones(2)))
        return sum(program.count(f"{name}[") for name in ("pmax", "pmin", "psum", "psum_invariant"))

    assert collectives(POLICY) == 1


def replicated_but_different(mesh: Any) -> Scaler:
    """Returns a scaler that JAX holds to be the same on all devices, though the second device has a lower scale."""
    step = jax.shard_map(first, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    return jax.jit(step)(parted())


def test_a_copy_that_differs_is_found_where_types_say_that_all_are_the_same(mesh: Any) -> None:
    def local(scaler: Scaler, x: Any) -> Any:
        _, grads, scaler, result = value_and_grad(lambda w: lax.pmean(jnp.sum(w * x), "data"))(scaler, jnp.ones(2))
        return grads, result

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    grads, result = step(replicated_but_different(mesh), ROWS)
    assert all(not np.asarray(shard.data).any() for shard in grads.addressable_shards)
    with pytest.raises(ScaleDesync, match="from 512 to 1024"):
        result.status()


@pytest.mark.parametrize("look", [Scaler.check, Scaler.to_dict], ids=["check", "to_dict"])
def test_copies_that_differ_are_named_with_their_devices(mesh: Any, look: Any) -> None:
    with pytest.raises(ScaleDesync, match=r"1024 on .*0, 512 on .*1, 1024 on .*2"):
        look(replicated_but_different(mesh))


def test_a_stack_of_scalers_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match=r"one scaler.*shape \(4,\).*Take one"):
        parted().check()
