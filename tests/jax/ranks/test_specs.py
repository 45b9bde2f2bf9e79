"""Parameters that are sharded over mapped axes: their norm, their mean and the share above an edge are those of all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradscale import Dynamic, Histogram
from gradscale.jax import Scaler, StepResult, scaled, value_and_grad

DEVICES = 4

POLICY = Dynamic(init_scale=1024.0)

TREE = {"kernel": np.arange(8, dtype=np.float32), "bias": np.float32(3)}
"""Gradients: `kernel` is sharded, `bias` is not."""

NORM = 149.0**0.5
"""Of all of them: 0 + 1 + 4 + ... + 49 is 140, and the bias adds 9."""

SPECS = {"kernel": P("data"), "bias": P()}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


def traced(mesh: Any, local: Any, *, check_vma: bool = False) -> Any:
    """Traces a step on `TREE`, and runs nothing."""
    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), SPECS), out_specs=P(), check_vma=check_vma)
    return jax.eval_shape(step, Scaler(POLICY), TREE)


def result_of(mesh: Any, policy: Any, *, check_vma: bool, **options: Any) -> StepResult:
    def local(scaler: Scaler, grads: Any) -> StepResult:
        return scaler.step(grads, **options)[2]

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), SPECS), out_specs=P(), check_vma=check_vma)
    return jax.jit(step)(Scaler(policy), TREE)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_norm_is_that_of_all_shards(mesh: Any, check_vma: bool) -> None:
    result: Any = result_of(mesh, POLICY, check_vma=check_vma, norm=True, specs=None if check_vma else SPECS)
    assert float(result.grad_norm) == pytest.approx(NORM / 1024, rel=1e-6)


def test_specs_change_nothing_where_jax_tracks_the_shards(mesh: Any) -> None:
    with_specs, without = (
        result_of(mesh, POLICY, check_vma=True, norm=True, specs=specs).grad_norm for specs in (SPECS, None)
    )
    assert float(with_specs) == float(without)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_share_above_an_edge_is_that_of_all_shards(mesh: Any, check_vma: bool) -> None:
    # 2 of 9 elements are above the edge, both on the last device: a share of 2/3 there, and of 0 on the others.
    policy = Histogram(edge=5.5 / 65504, threshold=0.3, init_scale=1024.0)
    result = result_of(mesh, policy, check_vma=check_vma, **({} if check_vma else {"specs": SPECS}))
    assert float(result.next_scale) == 1024.0


def test_gradients_of_shards_are_those_of_the_mean_of_all_losses() -> None:
    def local(scaler: Scaler, kernel: Any, x: Any) -> Any:
        def loss(kernel: Any) -> Any:
            return jnp.sum(lax.all_gather(kernel, "data", tiled=True) * x)

        _, grads, _, result = value_and_grad(loss, mean_axes="data", specs=P("data"), norm=True)(scaler, kernel)
        return grads, result.grad_norm

    x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (DEVICES, 8)), jnp.float32)
    step = jax.pmap(local, axis_name="data", in_axes=(None, 0, 0), devices=jax.devices()[:DEVICES])
    grads, norms = step(Scaler(POLICY), TREE["kernel"].reshape(DEVICES, 2), x)
    assert grads.reshape(8).tolist() == x.mean(0).tolist()
    np.testing.assert_allclose(norms, [jnp.linalg.norm(x.mean(0))] * DEVICES, rtol=1e-6)


def test_the_optax_transformation_clips_by_the_norm_of_all_shards(mesh: Any) -> None:
    tx = scaled(optax.sgd(1.0), POLICY, clip_norm=1.0, specs=SPECS)

    def local(grads: Any) -> Any:
        return tx.update(grads, tx.init(grads))[0]

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS, check_vma=False))
    updates = step(jax.tree.map(lambda leaf: leaf * 1024, TREE))
    expected = jax.tree.map(lambda leaf: -leaf / NORM, TREE)
    jax.tree.map(lambda left, right: np.testing.assert_allclose(left, right, rtol=1e-5), updates, expected)


@pytest.mark.parametrize("option", [{"clip_norm": 1.0}, {"norm": True}])
@pytest.mark.parametrize("mapped", ["shard_map", "pmap", "vmap"])
def test_a_norm_is_refused_where_nothing_says_what_is_sharded(mesh: Any, mapped: str, option: Any) -> None:
    def local(scaler: Scaler, grads: Any) -> Any:
        return scaler.step(grads, axis_names="data", **option)[2].grad_norm

    step: Any = {
        "shard_map": lambda: traced(mesh, local),
        "pmap": lambda: jax.pmap(local, axis_name="data", in_axes=(None, 0))(Scaler(POLICY), jnp.ones((DEVICES, 2))),
        "vmap": lambda: jax.vmap(local, axis_name="data", in_axes=(None, 0))(Scaler(POLICY), jnp.ones((DEVICES, 2))),
    }[mapped]
    with pytest.raises(ValueError, match=r"need `specs`.*specs=None where \['data'\] is mapped.*Give the"):
        step()


def test_a_share_above_an_edge_is_refused_where_nothing_says_what_is_sharded(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"`Histogram` need `specs`.*specs=None where \['data'\] is mapped"):
        result_of(mesh, Histogram(), check_vma=False)


def test_specs_of_another_structure_are_refused(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"`specs` must be one `PartitionSpec`, or a pytree.*Received: .*'weight'"):
        traced(mesh, lambda scaler, grads: scaler.step(grads, specs={"weight": P()})[2])


def test_specs_that_are_no_partition_specs_are_refused(mesh: Any) -> None:
    with pytest.raises(TypeError, match=r"`specs` must hold a `PartitionSpec` for each parameter.*Received: 'data'"):
        traced(mesh, lambda scaler, grads: scaler.step(grads, specs="data")[2])


def test_an_axis_in_specs_that_is_not_mapped_is_refused(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"An axis must be mapped.*Received: 'modelx'"):
        traced(mesh, lambda scaler, grads: scaler.step(grads, specs=P("modelx"))[2])


def test_the_mean_of_the_shards_of_a_parameter_is_refused(mesh: Any) -> None:
    def local(scaler: Scaler, weights: Any) -> Any:
        return value_and_grad(lambda kernel: jnp.sum(kernel**2), mean_axes="data")(scaler, weights["kernel"])[3]

    with pytest.raises(ValueError, match=r"`mean_axes` is for `pmap`.*over \['data'\] itself"):
        traced(mesh, local, check_vma=True)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_fault_in_one_shard_after_the_reduction_counts_for_all(mesh: Any, check_vma: bool, bad: float) -> None:
    def local(scaler: Scaler, grads: Any) -> Any:
        fault = jnp.where(lax.axis_index("data") == 2, bad, 0.0)
        grads, scaler, result = scaler.step(grads | {"kernel": grads["kernel"] + fault}, clip_norm=1.0, specs=SPECS)
        return grads, scaler, result

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), SPECS), out_specs=(SPECS, P(), P()), check_vma=check_vma)
    grads, scaler, result = jax.jit(step)(Scaler(POLICY), TREE)
    for leaf in (result.applied, result.grad_norm, scaler.loss_scale):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert (bool(result.applied), float(scaler.loss_scale)) == (False, 512.0)
    assert [culprit.name for culprit in result.culprits()] == ["kernel"]
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(grads))
