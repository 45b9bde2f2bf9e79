"""`Scaler`: a value that keeps its policy, its types and its arrays through every transformation of JAX."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.jax.helpers import INF, NAN, POLICY, programs, same
from tests.other_names import check_answers

from gradscale import Dynamic, Histogram, NoScaling, Policy, ScaleState, Static, Status, import_state, preset
from gradscale.engine.metrics import METRICS
from gradscale.jax import Scaler, ScaleStuck, StepResult, scaled, value_and_grad
from gradscale.kernels import jax as kernels
from gradscale.policies.headroom import Headroom
from gradscale.policies.log_max import LogMax
from gradscale.record import Record

ODD = Dynamic(
    init_scale=96.0,
    growth_factor=3.0,
    backoff_factor=0.25,
    growth_interval=7,
    hysteresis=3,
    refill="clean",
    min_scale=2.0,
    max_scale=4096.0,
)

POLICIES = [
    ODD,
    Static(3.0),
    NoScaling(),
    Headroom(),
    LogMax(),
    Histogram(),
    preset("flax"),
    preset("jmp", loss_scale=2.0**15),
    preset("deepspeed"),
]


def kinds(tree: Any) -> list[tuple[Any, Any, bool]]:
    return [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_step_changes_no_type_so_nothing_is_compiled_twice(policy: Policy) -> None:
    @jax.jit
    def step(scaler: Scaler, grad: Any) -> Scaler:
        return scaler.step(grad, jnp.float32(1))[1]

    scaler = Scaler(policy)
    before = kinds(scaler)
    for value in (1.0, INF, 2.0):
        scaler = step(scaler, jnp.array([value, 1.0]))
    assert kinds(scaler) == before
    assert not any(weak for _, _, weak in before)
    assert programs(step) == 1


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_setting_is_kept_through_jit_vmap_and_scan(policy: Policy) -> None:
    scaler = Scaler(policy)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), scaler)
    looped, _ = jax.lax.scan(lambda carry, grad: (carry.step(grad)[1], None), scaler, jnp.ones((3, 2)))
    mapped = jax.vmap(lambda one: one.step(jnp.ones(2))[1])(many)
    assert jax.jit(lambda one: one)(scaler).policy == looped.policy == mapped.policy == policy
    assert type(looped.state) is type(mapped.state) is type(policy.start())


def test_every_setting_is_kept_through_grad_and_checkpoint() -> None:
    @jax.checkpoint
    def cost(weight: Any, scaler: Scaler) -> Any:
        assert scaler.policy == ODD
        return scaler.scale(weight**2) / scaler.loss_scale

    assert jax.grad(cost)(jnp.float32(3), Scaler(ODD)) == 6.0


def test_scales_move_on_their_own_under_vmap() -> None:
    scalers = jax.vmap(lambda scale: Scaler(POLICY).with_state(ScaleState(**state_at(scale))))(jnp.array([8.0, 1024.0]))
    _, after, result = jax.vmap(lambda scaler, grad: scaler.step(grad))(scalers, jnp.array([[1.0, 1.0], [INF, 1.0]]))
    assert after.state.scale.tolist() == [8.0, 512.0]
    assert result.applied.tolist() == [True, False]


def state_at(scale: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("clean_steps", "credits", "applied", "skipped", "consecutive_skips"), jnp.int32(1))
    return {"scale": scale, "stuck": jnp.bool_(False), **counts}


@pytest.mark.filterwarnings("error:Some donated buffers were not usable")
def test_a_scaler_can_be_donated_and_the_result_outlives_it() -> None:
    @partial(jax.jit, donate_argnums=0)
    def step(scaler: Scaler, grad: Any) -> Any:
        return scaler.step(grad)[1:]

    scaler, first = step(Scaler(POLICY), jnp.array([INF]))
    scaler, second = step(scaler, jnp.array([1.0]))
    assert [float(one.scale) for one in (first, second)] == [1024.0, 512.0]
    assert [float(one.next_scale) for one in (first, second)] == [512.0, 512.0]


@pytest.mark.parametrize("policy", [POLICY, Static(8.0)])
def test_a_result_that_was_not_compiled_outlives_the_scaler_too(policy: Policy) -> None:
    _, scaler, result = Scaler(policy).step(jnp.ones(2))
    jax.jit(lambda scaler: scaler.step(jnp.ones(2))[1], donate_argnums=0)(scaler)
    assert float(result.scale) == float(result.next_scale) == float(Scaler(policy).loss_scale)


def test_leaves_are_named_after_the_fields_of_the_state() -> None:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(Scaler())[0]]
    assert paths[:2] == [".state.scale", ".state.clean_steps"]


def test_scale_multiplies_every_loss_of_a_pytree() -> None:
    assert Scaler(POLICY).scale({"a": jnp.float32(2), "b": [jnp.ones(2)]})["b"][0].tolist() == [1024.0, 1024.0]


def test_an_infinite_loss_given_to_step_leaves_the_scale_alone() -> None:
    grads, scaler, result = Scaler(POLICY).step({"w": jnp.ones(2)}, {"a": jnp.float32(1), "b": jnp.array([1.0, NAN])})
    assert result.status() is Status.NONFINITE_LOSS
    assert float(scaler.loss_scale) == 1024.0
    assert grads["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("policy", [Dynamic(), Headroom()])
def test_gradients_may_be_python_numbers(policy: Policy) -> None:
    scaler = Scaler(policy)
    grads, _, result = scaler.step({"w": 3.0 * float(scaler.loss_scale)})
    assert (float(grads["w"]), result.skipped()) == (3.0, False)


def test_metrics_count_applied_and_skipped_steps() -> None:
    scaler = Scaler(POLICY)
    for value in (1.0, INF, 1.0, 1.0):
        scaler = scaler.step(jnp.array([value]))[1]
    metrics = {name: float(value) for name, value in scaler.metrics().items()}
    assert tuple(metrics) == METRICS
    known = {name: value for name, value in metrics.items() if not np.isnan(value)}
    assert known == {"scale": 512.0, "applied": 3.0, "skipped": 1.0, "skip_rate": 0.25}


@pytest.mark.parametrize("compiled", [False, True])
def test_metrics_have_the_norm_and_the_headroom_of_a_result(compiled: bool) -> None:
    def step(scaler: Scaler, grads: Any) -> Any:
        _, scaler, result = scaler.step(grads, norm=True)
        return scaler.metrics(result)

    scaler = Scaler(Headroom(init_scale=4.0))
    metrics = (jax.jit(step) if compiled else step)(scaler, jnp.array([12.0, 16.0]))
    assert all(isinstance(value, jax.Array) for value in metrics.values())
    assert float(metrics["grad_norm"]) == 5.0
    assert float(metrics["headroom_bits"]) == pytest.approx(np.log2(65504 / (4.0 * float(metrics["scale"]))), rel=1e-5)


def test_metrics_of_a_result_that_measured_nothing_are_nan() -> None:
    _, scaler, result = Scaler(POLICY).step(jnp.ones(2))
    metrics = scaler.metrics(result)
    assert np.isnan([metrics["grad_norm"], metrics["headroom_bits"]]).all()


def test_another_systems_state_can_be_taken_over() -> None:
    policy, state = import_state("flax", {"fin_steps": 5, "scale": 2.0**20})
    scaler = Scaler(policy, state)
    assert float(scaler.loss_scale) == 2.0**20
    assert int(scaler.state.clean_steps) == 5


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_scaler_goes_through_its_dict(policy: Policy) -> None:
    scaler = Scaler(policy)
    for value in (2.0, INF, INF, 8.0):
        scaler = scaler.step(jnp.array([value, -1.0]))[1]
    assert same(Scaler.from_dict(scaler.to_dict()), scaler)


def test_a_class_is_not_a_policy() -> None:
    with pytest.raises(TypeError, match=r"`policy` must be a policy, such as `Dynamic\(\)`"):
        Scaler(Dynamic)  # pyright: ignore[reportArgumentType]


def test_a_state_of_another_policy_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`state` must be a HeadroomState"):
        Scaler(Headroom(), Dynamic().start())


def test_a_policy_with_arrays_as_settings_is_refused() -> None:
    @dataclass(frozen=True)
    class Several(Record):
        scales: Any
        needs: ClassVar[frozenset[str]] = frozenset({"finite"})

        def start(self) -> ScaleState:
            return ScaleState(scale=np.float32(1))

        def next(self, state: Any, seen: Any, xp: Any) -> Any:
            return state

    with pytest.raises(TypeError, match=r"settings of a policy must be Python numbers.*make one scaler of each"):
        Scaler(Several(np.ones(2)))


def stuck_run(steps: int, gradients: Any, loss: float = 1.0) -> tuple[Scaler, StepResult]:
    """Returns what is left of a run whose every step is the same."""
    scaler = Scaler(Dynamic(init_scale=2.0, min_scale=1.0))
    step = jax.jit(lambda scaler: scaler.step(gradients, jnp.float32(loss))[1:])
    scaler, result = step(scaler)
    for _ in range(steps - 1):
        scaler, result = step(scaler)
    return scaler, result


def test_a_run_that_skips_every_step_at_the_lowest_scale_is_stuck() -> None:
    scaler, result = stuck_run(5, {"fine": jnp.ones(2), "hurt": jnp.array([1.0, jnp.nan])})
    scaler.check(result, max_consecutive_skips=6)
    with pytest.raises(ScaleStuck, match=r"5 steps in a row.*one parameter, 'hurt', overflows.*hurt \(nan\)\."):
        scaler.check(result, max_consecutive_skips=5)


def test_a_run_whose_loss_is_never_finite_is_stuck() -> None:
    scaler, result = stuck_run(3, {"fine": jnp.ones(2)}, loss=jnp.inf)
    with pytest.raises(ScaleStuck, match="No scale, retry or policy can help"):
        scaler.check(result, max_consecutive_skips=3)


def test_a_run_that_still_has_a_lower_scale_to_try_is_not_stuck() -> None:
    _, scaler, result = Scaler(Dynamic(init_scale=2.0**10)).step({"hurt": jnp.array([jnp.inf])})
    scaler.check(result, max_consecutive_skips=1)


def test_parameters_that_have_diverged_point_at_the_learning_rate() -> None:
    _, scaler, result = Scaler().step({"w": jnp.ones(2)})
    for _ in range(3):
        _, scaler, result = scaler.step({"w": jnp.ones(2)}, jnp.float32(jnp.nan))
    params = {"bias": jnp.ones(2), "w": jnp.array([1.0, -4e5]), "step": jnp.int32(7)}
    with pytest.raises(
        ScaleStuck, match=r"since step 2, and the loss is.*weight, in w, is 4e\+05 .*learning rate is too"
    ):
        scaler.check(result, max_consecutive_skips=3, params=params)
    with pytest.raises(ScaleStuck, match=r"No scale.*look at the forward pass"):
        scaler.check(result, max_consecutive_skips=3, params={"w": jnp.ones(2)})


@pytest.mark.parametrize("loss", [None, jnp.nan])
def test_a_dead_run_of_scaled_is_noticed_without_a_result(loss: Any) -> None:
    tx = scaled(optax.sgd(0.1), Dynamic(init_scale=4.0))
    params = {"w": jnp.ones(2)}
    state: Any = tx.init(params)
    for _ in range(6):
        state.scaler.check(max_consecutive_skips=6)
        _, state = tx.update({"w": jnp.full(2, jnp.nan)}, state, params, **({} if loss is None else {"loss": loss}))
    with pytest.raises(ScaleStuck, match="6 steps in a row were skipped, every step so far"):
        state.scaler.check(max_consecutive_skips=6)


def test_a_policy_can_be_named_as_on_the_command_line() -> None:
    assert Scaler("auto").policy == Scaler().policy == Headroom()
    assert Scaler("dynamic:growth_interval=100").policy == Dynamic(growth_interval=100)
    with pytest.raises(ValueError, match=r"`policy` must be a policy, .* or name one"):
        Scaler("headrom")


def test_names_of_other_scalers_are_answered_with_what_to_use() -> None:
    check_answers(Scaler(), "jax")


def test_settings_of_other_scalers_are_answered_with_a_policy() -> None:
    with pytest.raises(TypeError, match=r"Use `Scaler\(Dynamic\(init_scale=8\.0\)\)`"):
        Scaler(init_scale=8.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"Use `scaled\(tx, policy=Dynamic\(growth_interval=7\)\)`"):
        scaled(optax.sgd(0.1), growth_interval=7)  # pyright: ignore[reportCallIssue]


def test_scaler_and_result_are_shown_with_scale_status_and_counts() -> None:
    scaler = Scaler(Dynamic(init_scale=8.0))
    _, scaler, result = jax.block_until_ready(scaler.step({"w": jnp.array([INF])}, norm=True))
    assert repr(scaler) == "Scaler(Dynamic(init_scale=8.0), scale=4.0, applied=0, skipped=1)"
    assert repr(result) == "StepResult(status=overflow, scale=8.0, next_scale=4.0, grad_norm=inf)"


def test_what_is_no_number_is_shown_by_what_it_is() -> None:
    scaler = Scaler("dynamic")
    texts: list[str] = []
    jax.jit(lambda traced: texts.append(repr(traced)) or traced.loss_scale)(scaler)
    assert texts == ["Scaler(Dynamic(), scale=<traced>, applied=<traced>, skipped=<traced>)"]
    assert repr(jax.tree.map(lambda _: None, scaler)).startswith("Scaler(Dynamic(), scale=<NoneType>")
    results = jax.vmap(lambda grad: scaler.step({"w": grad})[2])(jnp.ones((3, 2)))
    assert repr(jax.block_until_ready(results)).startswith("StepResult(status=<shape (3,)>, scale=<shape (3,)>")
    donated = jax.device_put(scaler, may_alias=False)
    jax.tree.map(lambda leaf: leaf.delete(), donated)
    assert repr(donated) == "Scaler(Dynamic(), scale=<donated>, applied=<donated>, skipped=<donated>)"


def test_an_array_on_a_device_is_not_read_to_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = Scaler("dynamic")
    monkeypatch.setattr(kernels, "place", lambda _: "<on cuda:0>")
    assert repr(scaler) == "Scaler(Dynamic(), scale=<on cuda:0>, applied=<on cuda:0>, skipped=<on cuda:0>)"


def test_a_result_has_no_truth_value_but_its_flags_have() -> None:
    result = Scaler("dynamic").step({"w": jnp.ones(2)})[2]
    with pytest.raises(TypeError, match="A StepResult is neither true nor false"):
        bool(result)
    for one in (result, jax.jit(lambda: result)()):
        for method in (one.skipped, one.status, one.culprits):
            with pytest.raises(TypeError, match="is a method, which has no truth value"):
                bool(method)
    assert result.applied


def test_arguments_of_other_steps_are_answered() -> None:
    step: Any = Scaler().step
    with pytest.raises(TypeError, match=r"^`scaler\.step` has no argument 'max_norm'\. .* Use `clip_norm=1\.0`\.$"):
        step({}, max_norm=1.0)
    with pytest.raises(TypeError, match=r"^`value_and_grad` has no argument 'has_axu'\. .* Did you mean 'has_aux'\?$"):
        value_and_grad(jnp.sum, has_axu=True)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
