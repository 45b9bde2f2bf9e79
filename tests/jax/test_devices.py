"""Eight devices: one scale for all of them, whichever of them overflows, mapped or compiled."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.jax.helpers import INF, NAN, POLICY, base_loss, batch, loss_of, number, params, same, spiked
from tests.jax.versions import set_mesh

from gradscale import Dynamic, Histogram, Status
from gradscale.engine.culprits import Culprit
from gradscale.jax import Scaler, StepResult, apply, loss_scale, scaled, value_and_grad
from gradscale.policies.headroom import Headroom

DEVICES = 8

PMAP_AXES = None if getattr(jax.config, "jax_pmap_shmap_merge", True) else "devices"
"""What `axis_names` must be under `pmap(axis_name="devices")`: None where its axis is found."""


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    assert len(jax.devices()) == DEVICES, "JAX was used before the tests could ask for eight devices"
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def spikes(bad: float) -> Any:
    return jnp.zeros(DEVICES).at[5].set(bad)


def over_devices(mesh: Any, function: Any, *, check_vma: bool) -> Any:
    """Returns a compiled step over the mesh: (scaler, params, x, spikes) -> grads, scaler, result."""

    def local(scaler: Scaler, weights: Any, x: Any, spike: Any) -> Any:
        return function(scaler, weights, x, spike[0])[1:]

    specs = (P(), P(), P("data"), P("data"))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma))


def mean_loss(weights: Any, x: Any, spike: Any) -> Any:
    return jax.lax.pmean(spiked(weights, x, spike), "data")


def test_what_one_device_finds_counts_for_all(mesh: Any) -> None:
    step = over_devices(mesh, value_and_grad(mean_loss), check_vma=True)
    for bad, culprit in ((INF, Culprit("out", "inf")), (NAN, Culprit("out", "nan"))):
        grads, scaler, result = step(Scaler(POLICY), params(), batch(), spikes(bad))
        assert result.status() is Status.OVERFLOW
        assert float(scaler.loss_scale) == 512.0
        assert same(grads, jax.tree.map(jnp.zeros_like, params()))
        assert result.culprits() == [culprit]


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_the_mean_over_the_devices_by_jax_or_where_asked(
    mesh: Any, check_vma: bool, retries: int
) -> None:
    loss, axes = (mean_loss, ()) if check_vma else (spiked, "data")
    function = value_and_grad(loss, clip_norm=0.01, retries=retries, mean_axes=axes)
    step = over_devices(mesh, function, check_vma=check_vma)
    grads, _, result = step(Scaler(POLICY), params(), batch(), spikes(0.0))
    expected, _, alone = jax.jit(value_and_grad(base_loss, clip_norm=0.01))(Scaler(POLICY), params(), batch())[1:]
    assert number(result.grad_norm) == pytest.approx(number(alone.grad_norm), rel=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("axis_names", "scales"), [(None, [512.0] * DEVICES), ((), [1024.0] * 5 + [512.0] + [1024.0] * 2)]
)
def test_scales_part_only_where_no_axis_is_named(mesh: Any, axis_names: Any, scales: list[float]) -> None:
    def local(scaler: Scaler, weights: Any, x: Any, spike: Any) -> Any:
        after = value_and_grad(spiked, axis_names=axis_names)(scaler, weights, x, spike[0])[2]
        return after.loss_scale[None]

    specs = (P(), P(), P("data"), P("data"))
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    assert jax.jit(step)(Scaler(POLICY), params(), batch(), spikes(INF)).tolist() == scales


def test_one_bad_loss_stops_the_retries_of_all_devices_and_keeps_the_scale(mesh: Any) -> None:
    def cost(weights: Any, x: Any, spike: Any) -> Any:
        return loss_of(weights, x) + spike

    function = value_and_grad(cost, retries=3, mean_axes="data")
    step = over_devices(mesh, function, check_vma=False)
    _, scaler, result = step(Scaler(Dynamic(init_scale=2.0**24)), params(), batch(), spikes(INF))
    assert (result.status(), int(result.retries)) == (Status.NONFINITE_LOSS, 0)
    assert float(scaler.loss_scale) == 2.0**24


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_retry_together_when_one_overflows(mesh: Any, check_vma: bool) -> None:
    def cost(weights: Any, x: Any, spike: Any) -> Any:
        loss = loss_of(weights, x * (1 + spike))
        return jax.lax.pmean(loss, "data") if check_vma else loss

    function = value_and_grad(cost, retries=20, mean_axes=() if check_vma else "data")
    _, scaler, result = over_devices(mesh, function, check_vma=check_vma)(
        Scaler(Dynamic(init_scale=2.0**20)), params(), batch(), spikes(100.0)
    )
    assert result.status() is Status.APPLIED
    assert int(result.retries) > 0
    assert float(scaler.loss_scale) == 2.0 ** (20 - int(result.retries))


def test_the_norm_of_parameters_spread_over_devices_is_that_of_all(mesh: Any) -> None:
    def local(scaler: Scaler, shard: Any) -> StepResult:
        return value_and_grad(lambda w: jnp.sum(w**2), norm=True)(scaler, shard)[3]

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    weights = jnp.arange(16.0)
    assert number(step(Scaler(POLICY), weights).grad_norm) == pytest.approx(float(jnp.linalg.norm(2 * weights)))


@pytest.mark.parametrize("policy", [Headroom(), Histogram(period=1)])
def test_policies_that_look_at_sizes_agree(mesh: Any, policy: Any) -> None:
    def local(scaler: Scaler, shard: Any) -> Any:
        after = value_and_grad(lambda w: jnp.sum(w**2))(scaler, shard)[2]
        return after.loss_scale

    weights = jnp.full(16, 2.0**-12).at[9].set(2.0**-4)
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    alone = jax.jit(value_and_grad(lambda w: jnp.sum(w**2)))(Scaler(policy), weights)[2]
    assert float(step(Scaler(policy), weights)) == float(alone.loss_scale)


def test_pmap_agrees_and_averages() -> None:
    def local(scaler: Scaler, weights: Any, x: Any, spike: Any) -> Any:
        return value_and_grad(spiked, mean_axes="devices")(scaler, weights, x, spike)[1:3]

    step = jax.pmap(local, axis_name="devices", in_axes=(None, None, 0, 0))
    grads, scaler = step(Scaler(POLICY), params(), batch()[:, None], spikes(0.0))
    expected = jax.grad(base_loss)(params(), batch())
    np.testing.assert_allclose(grads["out"][3], expected["out"], rtol=1e-4, atol=1e-6)
    _, scaler = step(Scaler(POLICY), params(), batch()[:, None], spikes(NAN))
    assert scaler.state.scale.tolist() == [512.0] * DEVICES


@pytest.mark.parametrize("name", ["devices", None])
def test_scales_of_devices_do_not_part_under_pmap(name: str | None) -> None:
    def local(scaler: Scaler, weights: Any, x: Any, spike: Any) -> Any:
        return value_and_grad(spiked, axis_names=PMAP_AXES if name else None)(scaler, weights, x, spike)[2]

    step = jax.pmap(local, axis_name=name, in_axes=(None, None, 0, 0))
    after = step(Scaler(POLICY), params(), batch()[:, None], spikes(INF))
    assert after.loss_scale.tolist() == [512.0] * DEVICES


@pytest.mark.skipif(PMAP_AXES is None, reason="this JAX tells an axis of pmap from one of vmap")
@pytest.mark.parametrize("mapped", [jax.pmap, jax.vmap])
def test_an_axis_that_may_be_one_of_pmap_must_be_named(mapped: Any) -> None:
    step = mapped(lambda grad: Scaler(POLICY).step(grad)[1].loss_scale, axis_name="devices")
    with pytest.raises(ValueError, match=r"`axis_names` must be given under `pmap`.*where \['devices'\] is mapped"):
        step(jnp.ones((2, 3)))


def test_an_axis_of_vmap_agrees_when_it_is_named() -> None:
    def local(spike: Any, axis_names: Any) -> Any:
        return value_and_grad(spiked, axis_names=axis_names)(Scaler(POLICY), params(), batch(), spike)[2].loss_scale

    alone = jax.jit(jax.vmap(partial(local, axis_names=None)))(jnp.array([0.0, INF]))
    apart = jax.jit(jax.vmap(partial(local, axis_names=()), axis_name="member"))(jnp.array([0.0, INF]))
    together = jax.jit(jax.vmap(partial(local, axis_names="member"), axis_name="member"))(jnp.array([0.0, INF]))
    assert (alone.tolist(), together.tolist()) == ([1024.0, 512.0], [512.0, 512.0])
    assert apart.tolist() == alone.tolist()


@pytest.mark.skipif(PMAP_AXES is not None, reason="this JAX does not tell an axis of vmap from one of pmap")
def test_an_axis_of_vmap_is_not_agreed_over_by_default() -> None:
    step = jax.vmap(lambda grad: Scaler(POLICY).step(grad)[1].loss_scale, axis_name="member")
    assert step(jnp.array([0.0, INF])).tolist() == [1024.0, 512.0]


def test_rows_that_average_their_gradients_skip_together() -> None:
    def local(spike: Any) -> Any:
        gradient = value_and_grad(lambda w: jnp.sum(w) + spike, mean_axes="member")
        return gradient(Scaler(POLICY), jnp.ones(2))[3].applied

    assert jax.vmap(local, axis_name="member")(jnp.array([0.0, INF])).tolist() == [False, False]


@pytest.mark.parametrize("retries", [0, 2])
def test_sharded_arrays_under_plain_jit_need_no_help(mesh: Any, retries: int) -> None:
    tx = optax.adam(1e-2)

    @jax.jit
    def step(weights: Any, opt_state: Any, scaler: Scaler, x: Any, bad: float) -> Any:
        _, grads, scaler, result = value_and_grad(spiked, clip_norm=0.01, retries=retries)(scaler, weights, x, bad)
        return *apply(tx, grads, opt_state, weights, result), scaler, result

    spread = {"hidden": NamedSharding(mesh, P(None, "data")), "out": NamedSharding(mesh, P("data"))}
    x = jax.device_put(batch(), NamedSharding(mesh, P("data")))
    weights = jax.device_put(params(), spread)
    for bad in (0.0, INF):
        many = step(weights, tx.init(weights), Scaler(POLICY), x, bad)
        one = step(params(), tx.init(params()), Scaler(POLICY), batch(), bad)
        assert many[0]["out"].sharding.is_equivalent_to(spread["out"], 2)
        assert same(many[2], one[2])
        for left, right in zip(jax.tree.leaves(many[0]), jax.tree.leaves(one[0]), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_retries_take_arrays_whose_spread_is_part_of_their_type() -> None:
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    with set_mesh(mesh):
        weights = jax.device_put(jnp.ones(DEVICES), NamedSharding(mesh, P("data")))
        _, grads, _, result = jax.jit(value_and_grad(lambda w: jnp.sum(w**2), retries=1))(Scaler(POLICY), weights)
    assert result.status() is Status.APPLIED
    assert grads.tolist() == [2.0] * DEVICES


def test_the_optax_transformation_agrees_too(mesh: Any) -> None:
    tx = scaled(optax.sgd(0.1), POLICY)

    def local(opt_state: Any, x: Any, spike: Any) -> Any:
        grads = jax.grad(lambda w: spiked(w, x, spike[0]) * loss_scale(opt_state))(params())
        after: Any = tx.update(jax.lax.pmean(grads, "data"), opt_state, params())[1]
        return after.scaler

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    assert float(jax.jit(step)(tx.init(params()), batch(), spikes(INF)).loss_scale) == 512.0


def test_a_mean_of_what_is_a_sum_already_is_refused(mesh: Any) -> None:
    step = over_devices(mesh, value_and_grad(spiked, mean_axes="data"), check_vma=True)
    with pytest.raises(ValueError, match=r"`mean_axes` is for `pmap`.*over \['data'\] itself.*`jax\.lax\.pmean`"):
        step(Scaler(POLICY), params(), batch(), spikes(0.0))
