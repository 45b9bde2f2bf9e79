"""OpenSeq2Seq's `BackoffScaler` and `LogMaxScaler`."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import advanced, assert_goes_on, scales, walked

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic

FLAGS = st.lists(st.booleans(), max_size=40)
STREAM = st.lists(st.tuples(st.booleans(), st.floats(2.0**-24, 2.0**15, width=32)), max_size=30)
BACKOFF = {"iteration": 12, "last_overflow_iteration": 9, "scale": 512.0}


def run(policy: Policy, state: Any, stream: list[tuple[bool, float]]) -> tuple[list[float], Any]:
    seen: list[float] = []
    for overflow, amax in stream:
        state = advanced(policy, state, overflow, amax=amax)
        seen.append(float(state.scale))
    return seen, state


def test_backoff_starts_from_its_upper_bound_and_keeps_to_both() -> None:
    policy = preset("openseq2seq", scale_min=3.0, scale_max=16.0, step_window=1)
    assert float(policy.start().scale) == 16.0
    assert scales(policy, [False, True, True, True, True]) == [16.0, 8.0, 4.0, 3.0, 3.0]


@given(FLAGS, FLAGS, st.integers(1, 5), st.sampled_from([2.0, 3.0]))
def test_exported_state_of_backoff_goes_on_as_before(
    before: list[bool], after: list[bool], window: int, factor: float
) -> None:
    policy = preset("openseq2seq", scale_min=0.5, scale_max=1000.0, step_factor=factor, step_window=window)
    assert_goes_on("openseq2seq", policy, walked(policy, before), after)


def test_log_max_needs_amax_and_starts_from_one() -> None:
    policy = preset("openseq2seq", "LogMaxScaler")
    assert policy.needs == {"finite", "loss_finite", "amax"}
    assert float(policy.start().scale) == 1.0


def test_log_max_puts_a_steady_amax_just_below_the_top_of_fp16() -> None:
    policy = preset("openseq2seq", "LogMaxScaler", scale_max=2.0**24)
    seen, _ = run(policy, policy.start(), [(False, 4.0)] * 50)
    assert seen[-1] == pytest.approx(2.0**14, rel=0.02)


def test_log_max_falls_to_its_lower_bound_on_overflow_and_is_stuck_there() -> None:
    policy = preset("openseq2seq", "LogMaxScaler", scale_min=2.0)
    _, state = run(policy, policy.start(), [(False, 4.0)] * 3)
    state = advanced(policy, state, True)
    assert (float(state.scale), bool(state.stuck)) == (2.0, False)
    assert bool(advanced(policy, state, True).stuck)


def test_log_max_takes_an_infinite_amax_for_an_overflow() -> None:
    policy = preset("openseq2seq", "LogMaxScaler")
    by_flag = advanced(policy, policy.start(), True)
    assert advanced(policy, policy.start(), False, amax=math.inf) == by_flag
    assert int(by_flag.skipped) == 1


@pytest.mark.parametrize("before", [[], [(False, 3.0), (True, 1.0), (False, 5.0)]], ids=["at first", "later"])
def test_log_max_goes_on_after_steps_whose_gradients_are_all_zero_as_if_there_were_none(
    before: list[tuple[bool, float]],
) -> None:
    policy = preset("openseq2seq", "LogMaxScaler")
    _, state = run(policy, policy.start(), before)
    scales, after = run(policy, state, [(False, 0.0), (False, 0.0)])
    assert scales == [float(state.scale)] * 2
    assert replace(after, applied=state.applied, consecutive_skips=state.consecutive_skips) == state
    assert int(after.applied) == int(state.applied) + 2
    further = [(False, 1.0), (False, 2.0)]
    assert run(policy, after, further)[0] == run(policy, state, further)[0]


@given(STREAM, STREAM)
def test_exported_state_of_log_max_goes_on_as_before(
    before: list[tuple[bool, float]], after: list[tuple[bool, float]]
) -> None:
    policy = preset("openseq2seq", "LogMaxScaler", scale_max=1e6, beta1=0.9, beta2=0.95, log_max=5.0)
    _, state = run(policy, policy.start(), before)
    other_policy, other = import_state("openseq2seq", export_state("openseq2seq", policy, state))
    assert other_policy == policy
    assert run(other_policy, other, after)[0] == run(policy, state, after)[0]


@pytest.mark.parametrize("prefix", ["", "Loss_Optimization/"])
def test_unnamed_variables_are_known_by_the_order_of_their_creation(prefix: str) -> None:
    saved = {f"{prefix}Variable_2": np.float32(512.0), f"{prefix}Variable": 12, f"{prefix}Variable_1": 9}
    others = {"global_step": np.int64(12), "dense/kernel": np.ones((2, 2))}
    policy, state = import_state("openseq2seq", saved | others | {"step_window": np.int64(5)})
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 3)
    assert float(advanced(policy, advanced(policy, state, False), False).scale) == 1024.0


def test_unnamed_variables_may_come_as_a_list() -> None:
    policy = preset("openseq2seq", "LogMaxScaler")
    _, state = run(policy, policy.start(), [(False, 3.0), (True, 1.0), (False, 5.0)])
    named = export_state("openseq2seq", policy, state)
    variables = [value for name, value in named.items() if name in (*list(named)[:7],)]
    assert run(*import_state("openseq2seq", variables), [(False, 2.0)])[0] == run(policy, state, [(False, 2.0)])[0]


def test_variables_numbered_later_keep_their_order() -> None:
    saved = {"Variable_10": 512.0, "Variable_9": 9, "Variable_8": 12}
    assert int(import_state("openseq2seq", saved)[1].clean_steps) == 3


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        ({"Variable": 1, "Variable_1": 2}, ValueError, "3 unnamed variables .* or 7 .* Received: 2"),
        ({"iteration": 1, "scale": 2.0}, ValueError, r"missing: \['last_overflow_iteration'\]"),
        (BACKOFF | {"last_overflow_iteration": 13}, ValueError, "must not come after `iteration`"),
        (BACKOFF | {"iteration": -1}, ValueError, "`iteration` .* between 0 and"),
        (BACKOFF | {"scale": math.nan}, ValueError, "must not be NaN"),
        (BACKOFF | {"window": 2}, ValueError, r"unknown: \['window'\]"),
        (BACKOFF | {"x_hat": 0.0}, ValueError, "missing: .*'b1_correction'"),
    ],
)
def test_import_refuses_what_openseq2seq_does_not_save(
    saved: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        import_state("openseq2seq", saved)


def test_bounds_of_dynamic_are_exported_even_where_they_are_the_default() -> None:
    exported = export_state("openseq2seq", Dynamic(), Dynamic().start())
    assert (exported["scale_min"], exported["scale_max"]) == (1.0, 2.0**126)


def test_export_refuses_a_rule_without_bounds() -> None:
    policy = preset("keras")
    with pytest.raises(ValueError, match="`scale_min` must be positive"):
        export_state("openseq2seq", policy, policy.start())


def test_dynamic_goes_on_in_backoff_as_before() -> None:
    policy = Dynamic(init_scale=64.0, growth_interval=3, min_scale=2.0, max_scale=128.0)
    assert_goes_on("openseq2seq", policy, walked(policy, [True, False]), [False] * 8 + [True] * 9)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"beta1": 1.0}, ValueError, "`beta1` must lie from 0 to below 1"),
        ({"scale_min": 0.0}, ValueError, "`scale_min` must be positive"),
        ({"log_max": "16"}, TypeError, "`log_max` must be a number"),
        ({"log_max": 63}, ValueError, "`log_max` must lie between 0 and 62"),
        ({"log_max": math.nan}, ValueError, "`log_max` must lie between 0 and 62"),
        ({"overflow_std_dev": math.inf}, ValueError, "`overflow_std_dev` must lie between 0 and"),
    ],
)
def test_log_max_refuses_settings_that_cannot_work(config: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        preset("openseq2seq", "LogMaxScaler", **config)
