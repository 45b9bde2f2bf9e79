"""The numpy LossScaler: scaling, the gate, the result, and what it refuses."""

import json
import math
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.other_names import check_answers

from gradscale import Dynamic, NoScaling, ScaleState, Static, Status
from gradscale.engine.culprits import Culprit
from gradscale.numpy import LossScaler, ScaleStuck
from gradscale.peers import preset
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.record import numbers


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def f16(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float16)


@pytest.mark.parametrize("scaler", [LossScaler(), LossScaler("auto")], ids=["default", "auto"])
def test_the_default_policy_is_headroom_from_16(scaler: LossScaler) -> None:
    assert scaler.policy == Headroom()
    assert scaler.loss_scale == 16.0


def test_scale_multiplies_the_loss() -> None:
    assert LossScaler(Static(1024.0)).scale(2.0) == 2048.0


def test_a_float16_loss_is_widened_before_it_is_scaled() -> None:
    scaled = LossScaler(Static(65536.0)).scale(np.float16(2.0))
    assert scaled == 131072.0
    assert scaled.dtype == np.float32


def test_a_float64_loss_stays_float64() -> None:
    assert LossScaler().scale(np.array([0.1])).dtype == np.float64


def test_a_clean_step_returns_the_gradients_unscaled() -> None:
    result = LossScaler(Static(8.0)).step([f32(8, -16)])
    assert result.applied
    assert result.status() is Status.APPLIED
    assert result.grads[0].tolist() == [1.0, -2.0]
    assert (result.factor, result.scale, result.next_scale, result.amax) == (0.125, 8.0, 8.0, 2.0)
    assert result.grad_norm is None
    assert result.culprits() == []


def test_the_gradients_given_are_left_as_they_are() -> None:
    grads = f32(8, 16)
    LossScaler(Static(8.0)).step([grads], clip_norm=0.1)
    assert grads.tolist() == [8.0, 16.0]


def test_an_overflow_skips_the_step_and_backs_off() -> None:
    scaler = LossScaler(Dynamic(init_scale=8.0))
    result = scaler.step([f32(1, math.inf)])
    assert not result.applied
    assert result.status() is Status.OVERFLOW
    assert result.grads is None
    assert (result.factor, result.scale, result.next_scale) == (0.0, 8.0, 4.0)
    assert scaler.loss_scale == 4.0


def test_culprits_name_the_arrays_and_count_what_was_wrong_with_each() -> None:
    grads = {"encoder": [f16(1), f16(math.inf, -math.inf, 1)], "head": {"weight": f32(math.nan, math.inf)}}
    assert LossScaler().step(grads).culprits() == [Culprit("encoder.1", "inf", 2), Culprit("head.weight", "nan", 2)]


def test_a_culprit_with_a_nan_is_a_nan() -> None:
    result = LossScaler().step([f32(math.inf, math.inf, math.nan, -math.inf), f32(math.inf, 1.0, -math.inf, math.inf)])
    assert [(culprit.kind, culprit.count) for culprit in result.culprits()] == [("nan", 4), ("inf", 3)]


def test_a_gradient_that_is_finite_only_while_scaled_skips_the_step() -> None:
    result = LossScaler(Static(2.0**-100)).step({"w": f32(1.0, 1e20)})
    assert result.status() is Status.OVERFLOW
    assert result.culprits() == [Culprit("w", "inf", 1)]


def test_a_float64_gradient_may_be_larger_than_float32_holds() -> None:
    result = LossScaler(Dynamic(init_scale=2.0)).step([np.array([2.0**600])])
    assert result.applied
    assert result.amax == 2.0**599
    assert result.grads[0].tolist() == [2.0**599]


def test_a_norm_whose_square_float32_does_not_hold_cannot_be_clipped() -> None:
    scaler = LossScaler(Dynamic(init_scale=2.0))
    assert scaler.step([np.array([2.0**64])], clip_norm=1.0).status() is Status.OVERFLOW
    assert scaler.step([np.array([2.0**63])], clip_norm=1.0).applied


def test_a_nonfinite_loss_given_to_step_skips_it_and_leaves_the_scale() -> None:
    scaler = LossScaler(Dynamic(init_scale=8.0))
    result = scaler.step([f32(math.nan)], loss=math.nan)
    assert result.status() is Status.NONFINITE_LOSS
    assert scaler.loss_scale == 8.0
    assert int(scaler.state.skipped) == 1


def test_a_nonfinite_loss_seen_by_scale_counts_until_the_next_step_and_no_longer() -> None:
    scaler = LossScaler(Static(8.0))
    scaler.scale(np.float32(math.inf))
    scaler.scale(1.0)
    assert scaler.step([f32(math.nan)]).status() is Status.NONFINITE_LOSS
    assert scaler.step([f32(1)]).status() is Status.APPLIED


@pytest.mark.parametrize("way", ["scale", "step"])
def test_the_loss_of_an_abandoned_batch_does_not_skip_the_next(way: str) -> None:
    scaler = LossScaler(Static(8.0))
    scaler.scale(math.nan)  # and no step: the batch is given up
    if way == "scale":
        scaler.scale(1.0)
    result = scaler.step([f32(8)], loss=None if way == "scale" else 1.0)
    assert (result.status(), result.grads[0].tolist()) == (Status.APPLIED, [1.0])


def test_the_last_loss_skips_the_step_even_if_all_gradients_are_finite() -> None:
    scaler = LossScaler(Static(8.0))
    scaler.scale(1.0)
    scaler.scale(math.nan)
    assert scaler.step([f32(1)]).status() is Status.NONFINITE_LOSS


def test_one_nonfinite_loss_of_several_is_enough() -> None:
    assert LossScaler().step([f32(1)], loss=[1.0, math.nan]).status() is Status.NONFINITE_LOSS


@pytest.mark.parametrize("grads", [[], {}, (), None, [None, {"w": None}]], ids=repr)
def test_no_gradients_at_all_change_nothing(grads: Any) -> None:
    scaler = LossScaler()
    before = scaler.state
    result = scaler.step(grads)
    assert result.status() is Status.NO_GRADS
    assert (result.grads, result.factor, result.scale, result.next_scale) == (None, 0.0, 16.0, 16.0)
    assert scaler.state is before


def test_an_array_without_elements_is_a_gradient_like_any_other() -> None:
    result = LossScaler().step([np.empty((0, 3), np.float16)], clip_norm=1.0)
    assert result.applied
    assert result.grads[0].shape == (0, 3)
    assert (result.amax, result.grad_norm) == (0.0, 0.0)


def test_clipping_is_folded_into_the_factor() -> None:
    result = LossScaler(Static(2.0)).step({"a": f32(6), "b": f32(8)}, clip_norm=1.0)
    assert result.grad_norm == 5.0
    assert result.factor == pytest.approx(0.5 / 5.0, rel=1e-6)
    assert [result.grads["a"][0], result.grads["b"][0]] == pytest.approx([0.6, 0.8], rel=1e-6)


def test_a_norm_below_the_bound_is_not_clipped() -> None:
    result = LossScaler(Static(2.0)).step([f32(6, 8)], clip_norm=10.0)
    assert result.grads[0].tolist() == [3.0, 4.0]


def test_the_norm_can_be_had_without_clipping() -> None:
    assert LossScaler(Static(2.0)).step([f32(6, 8)], norm=True).grad_norm == 5.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norm_and_amax_of_a_step_that_overflows_are_infinite(bad: float) -> None:
    result = LossScaler().step([f32(1), f32(1, bad)], norm=True)
    assert (result.grad_norm, result.amax) == (math.inf, math.inf)


def test_a_rule_is_given_float32_even_of_gradients_that_only_float64_holds() -> None:
    scaler = LossScaler(Headroom())
    result = scaler.step([np.array([1e200])])
    assert result.applied
    assert numbers(scaler.state)["peak"] == np.finfo(np.float32).max
    assert numbers(scaler.state)["peak"].dtype == np.float32


def test_no_scaling_looks_at_nothing_and_applies_everything() -> None:
    result = LossScaler(NoScaling()).step([f32(math.nan)], loss=math.nan)
    assert result.applied
    assert math.isnan(result.grads[0][0])
    assert (result.amax, result.culprits()) == (None, [])


def test_no_scaling_clips_where_it_is_asked_to() -> None:
    result = LossScaler(NoScaling()).step([f32(3, 4)], clip_norm=1.0)
    assert result.grads[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


def test_headroom_is_given_the_unscaled_amax() -> None:
    scaler = LossScaler(Headroom(init_scale=2.0**16))
    scaler.step([f32(-65536 * 2.0**-10, 1)])
    assert scaler.state.to_dict()["peak"] == 2.0**-10


def test_histogram_is_given_the_share_above_its_edge() -> None:
    policy = Histogram(init_scale=1024.0, threshold=0.25)
    scaler = LossScaler(policy)
    edge = policy.edge_magnitude
    assert scaler.step([f32(edge, edge, edge, 2 * edge)]).next_scale == 1024.0
    assert scaler.step([f32(edge, edge), f32(2 * edge, 2 * edge)]).next_scale == 512.0


def test_a_policy_that_does_not_say_its_edge_is_refused() -> None:
    edgeless: Any = SimpleNamespace(needs=frozenset({"upper_share"}), start=Dynamic().start, next=Dynamic().next)
    with pytest.raises(TypeError, match="A policy that needs `upper_share` must have an `edge_magnitude`"):
        LossScaler(edgeless)


def test_the_rule_of_popart_halves_the_scale_for_gradients_above_its_edge() -> None:
    scaler = LossScaler(preset("popart", lossScaling=1024.0, binEdgeLocation=0.5))
    assert scaler.step([f32(0.6 * 65535)]).next_scale == 512.0
    assert scaler.step([f32(0.4 * 65535)]).next_scale == 1024.0


@pytest.mark.parametrize("system", ["torch", "apex", "paddle", "mxnet", "popart", "keras", "megatron"])
def test_another_systems_rule_stops_before_its_scale_cannot_divide_gradients(system: str) -> None:
    scaler = LossScaler(preset(system), on_stuck=lambda _: None)
    for _ in range(200):
        scaler.step([f32(math.inf)])
    assert scaler.loss_scale >= 2.0**-126
    scale = np.float32(scaler.loss_scale)
    result = scaler.step([f32(0.0, 1.0) * scale])
    assert result.applied
    assert result.grads[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("system", ["torch", "apex", "paddle", "mxnet", "popart", "keras"])
def test_a_run_by_another_systems_rule_is_stuck_long_before_its_scale_reaches_its_end(system: str) -> None:
    scaler = LossScaler(preset(system))
    for _ in range(49):
        scaler.step([f32(math.inf)])
    with pytest.raises(ScaleStuck, match="no lower scale"):
        scaler.step([f32(math.inf)])


def test_metrics_are_numbers_and_nan_where_there_is_none_yet() -> None:
    metrics = LossScaler(Static(4.0)).metrics()
    assert math.isnan(metrics.pop("grad_norm"))
    assert math.isnan(metrics.pop("headroom_bits"))
    assert metrics == {"scale": 4.0, "applied": 0.0, "skipped": 0.0, "skip_rate": 0.0}


def test_metrics_count_steps_and_measure_the_headroom() -> None:
    scaler = LossScaler(Static(4.0))
    for value in (1.0, 1.0, math.inf, 65504 / 8):
        scaler.step([f32(value)], norm=True)
    assert scaler.metrics() == {
        "scale": 4.0,
        "applied": 3.0,
        "skipped": 1.0,
        "skip_rate": 0.25,
        "grad_norm": 65504 / 32,
        "headroom_bits": 3.0,
    }


def test_headroom_is_unknown_after_an_overflow() -> None:
    scaler = LossScaler()
    scaler.step([f32(1, math.inf)])
    assert math.isnan(scaler.metrics()["headroom_bits"])


@pytest.mark.filterwarnings("error")
def test_headroom_of_gradients_that_float32_cannot_hold_once_scaled() -> None:
    scaler = LossScaler(Static(2.0**14))
    scaler.step([np.array([65504 * 2.0**900])])
    assert scaler.metrics()["headroom_bits"] == pytest.approx(-900)
    scaler = LossScaler(Dynamic(init_scale=2.0**14, growth_interval=1))
    scaler.step([f32(65504 * 2.0**111)])
    assert scaler.metrics()["headroom_bits"] == pytest.approx(-112)


@pytest.mark.filterwarnings("error")
def test_metrics_of_an_overflow_at_the_lowest_scale_do_not_warn() -> None:
    scaler = LossScaler(preset("torch", init_scale=2.0**-126))
    scaler.step([f32(math.inf)])
    assert math.isnan(scaler.metrics()["headroom_bits"])


def test_the_gradients_of_a_result_live_no_longer_than_it_does() -> None:
    scaler = LossScaler()
    result = scaler.step([f32(1)])
    grads = weakref.ref(result.grads[0])
    del result
    assert grads() is None


step_flags = st.lists(st.sampled_from(["clean", "overflow", "bad loss"]), max_size=30)


def run(scaler: LossScaler, flags: list[str]) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = []
    for flag in flags:
        grads = [f16(math.inf if flag == "overflow" else scaler.loss_scale / 1e6, 3e-5)]
        scaler.step(grads, loss=math.nan if flag == "bad loss" else 1.0)
        states.append(scaler.state.to_dict())
    return states


@pytest.mark.parametrize(
    "policy",
    [Dynamic(init_scale=1e4, growth_interval=3, growth_factor=1.7, hysteresis=2), Static(3.0), Headroom(), Histogram()],
    ids=lambda policy: type(policy).__name__,
)
@settings(max_examples=30)
@given(before=step_flags, after=step_flags)
def test_a_saved_scaler_continues_bit_exactly(policy: Any, before: list[str], after: list[str]) -> None:
    original, resumed = (LossScaler(policy, max_consecutive_skips=1000) for policy in (policy, "auto"))
    run(original, before)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert resumed.policy == original.policy
    assert run(resumed, after) == run(original, after)


def test_loading_forgets_losses_and_results_of_before() -> None:
    scaler = LossScaler(Static(2.0))
    saved = scaler.state_dict()
    scaler.step([f32(1.0)], norm=True)
    scaler.scale(math.nan)
    scaler.load_state_dict(saved)
    assert math.isnan(scaler.metrics()["grad_norm"])
    assert scaler.step([f32(1.0)]).applied


def test_the_last_result_is_kept_without_its_gradients() -> None:
    scaler = LossScaler(Static(2.0))
    with pytest.raises(RuntimeError, match=r"There is a result once a step was taken\. Call `step` first"):
        _ = scaler.last
    result = scaler.step({"w": f32(1.0)})
    assert (result.skipped(), scaler.last.skipped(), scaler.last.scale, scaler.last.next_scale) == (False, False, 2, 2)
    assert scaler.step({"w": f32(math.inf)}).skipped()
    assert scaler.last.culprits() == [Culprit("w", "inf", 1)]


def skip(scaler: LossScaler, times: int) -> None:
    for _ in range(times):
        scaler.step({"w": f32(math.inf), "b": f32(1.0)})


@pytest.mark.parametrize("policy", [Static(8.0), Dynamic(init_scale=1.0, min_scale=1.0)], ids=["static", "floor"])
def test_a_run_that_skips_every_step_is_stuck(policy: Any) -> None:
    scaler = LossScaler(policy, max_consecutive_skips=3)
    skip(scaler, 2)
    with pytest.raises(ScaleStuck, match=r"^3 steps in a row .*one parameter, 'w', overflows.*w \(inf\)\."):
        skip(scaler, 1)
    assert int(scaler.state.skipped) == 3
    assert scaler.step([f32(1.0)]).applied


def test_fifty_losses_in_a_row_that_are_not_finite_are_enough() -> None:
    scaler = LossScaler()
    for _ in range(49):
        scaler.step([f32(1.0)], loss=math.nan)
    with pytest.raises(ScaleStuck, match="No scale, retry or policy can help"):
        scaler.step([f32(1.0)], loss=math.nan)


def test_the_step_since_which_the_loss_is_not_finite_is_named_and_nothing_is_made_up() -> None:
    scaler = LossScaler(max_consecutive_skips=3)
    for loss in (1.0, 1.0, math.nan, math.nan):
        scaler.step([f32(1.0)], loss=loss)
    with pytest.raises(ScaleStuck, match=r"^3 steps .* NaN since step 3\. No scale") as caught:
        scaler.step([f32(1.0)], loss=math.nan)
    assert "Gradients that were not finite" not in str(caught.value)
    assert "Likely cause" not in str(caught.value)


def test_a_stuck_run_is_reported_again_once_it_is_loaded() -> None:
    calls: list[ScaleStuck] = []
    scaler = LossScaler(Static(8.0), max_consecutive_skips=2, on_stuck=calls.append)
    skip(scaler, 3)
    scaler.load_state_dict(scaler.state_dict())
    skip(scaler, 1)
    assert len(calls) == 2


def test_a_stuck_run_can_call_a_function_and_go_on() -> None:
    calls: list[ScaleStuck] = []
    skip(LossScaler(Static(8.0), max_consecutive_skips=2, on_stuck=calls.append), 5)
    assert [[culprit.name for culprit in call.culprits] for call in calls] == [["w"]]


def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="`max_consecutive_skips` must be"):
        LossScaler(max_consecutive_skips=0)


def test_a_scaler_can_start_from_a_state() -> None:
    state = ScaleState(scale=np.float32(32.0), applied=np.int32(7))
    scaler = LossScaler(Dynamic(), state)
    scaler.step([f32(1.0)])
    assert (scaler.loss_scale, int(scaler.state.applied)) == (32.0, 8)


def refused(error: type[Exception], match: str, scaler: LossScaler, *args: Any, **kwargs: Any) -> None:
    """Asserts that the step is refused with `match` and that nothing of the scaler has changed."""
    before = scaler.state_dict()
    with pytest.raises(error, match=match):
        scaler.step(*args, **kwargs)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (np.array([1, 2]), r"must have one of the types float8_e4m3fn.* Received: 'w' of type int64"),
        (np.array(["1"]), r"Received: 'w' of type str"),
        (np.array([None]), r"Received: 'w' of type object"),
        (np.array([True]), r"Received: 'w' of type bool"),
        (1.0, r"must be numpy arrays, alone or in lists, tuples and dicts\. Received: 'w' of type float"),
        ("text", r"Received: 'w' of type str"),
        ({1.0}, r"Received: 'w' of type set"),
    ],
)
def test_what_is_not_an_array_of_floats_is_refused(leaf: Any, match: str) -> None:
    refused(TypeError, match, LossScaler(), {"w": leaf})


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_is_refused(clip_norm: float) -> None:
    refused(ValueError, "`clip_norm` must be greater than 0", LossScaler(), [f32(1)], clip_norm=clip_norm)


def test_a_bound_that_is_not_a_number_is_refused() -> None:
    refused(TypeError, "`clip_norm` must be a number", LossScaler(), [f32(1)], clip_norm="1")


@pytest.mark.parametrize("loss", ["1.0", 1, None, 1 + 2j, [None]])
def test_a_loss_that_is_not_floating_point_is_refused(loss: Any) -> None:
    if loss is not None:
        refused(TypeError, "`loss` must be a floating-point number or array", LossScaler(), [f32(1)], loss=loss)
    with pytest.raises(TypeError, match="`loss` must be a floating-point number or array"):
        LossScaler().scale(loss)


def test_a_refused_step_keeps_the_losses_seen_before_it() -> None:
    scaler = LossScaler(Static(2.0))
    scaler.scale(math.nan)
    refused(TypeError, "must be numpy arrays", scaler, [1.0])
    assert scaler.step([f32(1)]).status() is Status.NONFINITE_LOSS


@pytest.mark.parametrize("policy", [Dynamic, None, 1024.0])
def test_what_is_not_a_policy_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"`policy` must be a policy, such as `Dynamic\(\)`"):
        LossScaler(policy)


def test_a_policy_can_be_named_as_on_the_command_line() -> None:
    assert LossScaler("dynamic:growth_interval=100").policy == Dynamic(growth_interval=100)


def test_names_of_other_scalers_are_answered_with_what_to_use() -> None:
    check_answers(LossScaler(), "numpy")


def test_settings_of_other_scalers_are_answered_with_a_policy() -> None:
    with pytest.raises(TypeError, match=r"Use `LossScaler\(policy=Dynamic\(init_scale=8\.0\)\)`"):
        LossScaler(init_scale=8.0)  # pyright: ignore[reportCallIssue]


def test_scaler_and_result_are_shown_with_scale_status_and_counts() -> None:
    scaler = LossScaler(Dynamic(init_scale=8.0))
    assert repr(scaler) == "LossScaler(Dynamic(init_scale=8.0), scale=8.0, applied=0, skipped=0)"
    result = scaler.step({"w": np.array([np.inf], np.float32)})
    assert repr(result) == "StepResult(status=overflow, scale=8.0, next_scale=4.0)"
    assert repr(scaler) == "LossScaler(Dynamic(init_scale=8.0), scale=4.0, applied=0, skipped=1, last=overflow)"


def test_a_state_of_several_scales_is_refused() -> None:
    with pytest.raises(ValueError, match="`state` must hold one scale, not a vector of them"):
        LossScaler(Dynamic(), ScaleState(scale=f32(1, 2)))


def test_a_state_of_another_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="`state` must be a HeadroomState"):
        LossScaler(Headroom(), Dynamic().start())


def test_what_is_not_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match="`state` must be a ScaleState"):
        LossScaler(Dynamic(), {"scale": 1.0})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda saved: {}, ValueError, r"has the keys \['policy', 'state'\]\. Received: \[\]"),
        (lambda saved: saved | {"extra": 1}, ValueError, r"Received: \['extra', 'policy', 'state'\]"),
        (lambda saved: saved | {"policy": None}, TypeError, "`policy` of a saved LossScaler must be a mapping"),
        (lambda saved: saved | {"policy": {"kind": "Nothing"}}, ValueError, "kind='Nothing'"),
        (lambda saved: saved | {"state": saved["policy"]}, ValueError, "ScaleState reads kind 'ScaleState'"),
        (lambda saved: saved | {"state": saved["state"] | {"scale": [1.0, 2.0]}}, ValueError, "must hold one scale"),
        (lambda saved: saved | {"state": saved["state"] | {"applied": -1}}, ValueError, "must not be negative"),
        (lambda saved: [], TypeError, r"takes what `state_dict` returned\. Received: list"),
    ],
)
def test_a_damaged_checkpoint_is_refused_whole(change: Any, error: type[Exception], match: str) -> None:
    scaler = LossScaler(Static(2.0))
    before = scaler.state_dict()
    with pytest.raises(error, match=match):
        scaler.load_state_dict(change(LossScaler(Dynamic()).state_dict()))
    assert scaler.state_dict() == before
