"""`replay`: the same scales as stepping each policy alone, whatever runs beside it."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stories import next_of

from gradscale import BF16, FP8_E4M3, FP16, Dynamic, Format, NoScaling, Policy, ScaleState, Seen, Static
from gradscale.peers import preset
from gradscale.peers.ladder import Ladder
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.replay.run import Summary, replay

FORMATS = (FP16, BF16, FP8_E4M3)


def stepped(
    policy: Policy,
    found_inf: Sequence[bool] | None,
    amax: Sequence[float] | None,
    loss_finite: Sequence[bool],
    format: Format = FP16,
    upper_share: Sequence[float] | None = None,
) -> tuple[list[Any], list[bool], list[bool]]:
    """Returns the states, the skips and the stuck flags of one policy, stepped by hand with scalars."""
    state = policy.start()
    states, skips, stucks = [state], [], []
    for step, whole_loss in enumerate(loss_finite):
        peak = 0.0 if amax is None else amax[step]
        if found_inf is not None:
            finite = not found_inf[step]
        else:
            finite = peak < 2.0**128 and peak * float(state.scale) < format.overflow_threshold
        shown = np.float32(peak if finite and peak < 2.0**128 else math.inf)
        share = np.float32(0 if upper_share is None else upper_share[step])
        seen = Seen(np.bool_(finite), np.bool_(whole_loss), amax=shown, upper_share=share)
        after = next_of(policy, state, seen)
        skips.append(bool(after.skipped != state.skipped))
        stucks.append(bool(after.stuck))
        state = after
        states.append(state)
    return states, skips, stucks


def assert_equal_states(actual: ScaleState, expected: ScaleState) -> None:
    assert type(actual) is type(expected)
    for field in fields(expected):
        np.testing.assert_array_equal(getattr(actual, field.name), getattr(expected, field.name), field.name)
        assert np.asarray(getattr(actual, field.name)).dtype == np.asarray(getattr(expected, field.name)).dtype


def assert_equals_stepping(
    policies: Sequence[Policy],
    found_inf: Sequence[bool] | None,
    amax: Sequence[float] | None,
    loss_finite: Sequence[bool],
    format: Format = FP16,
    upper_share: Sequence[float] | None = None,
) -> None:
    run = replay(policies, found_inf, amax, format, loss_finite=loss_finite, upper_share=upper_share)
    for column, policy in enumerate(policies):
        states, skips, stucks = stepped(policy, found_inf, amax, loss_finite, format, upper_share)
        scales = [state.scale for state in states]
        np.testing.assert_array_equal(run.scales[:, column], scales[1:], repr(policy))
        np.testing.assert_array_equal(run.scales_before[:, column], scales[:-1])
        assert run.skipped[:, column].tolist() == skips
        assert run.stuck[:, column].tolist() == stucks
        assert_equal_states(run.states()[column], states[-1])


exponents = st.integers(-20, 40).map(lambda exponent: 2.0**exponent)
odd_factors = st.sampled_from([1.1, 1.5, 2.0, 3.0, 1e6]) | st.floats(1.01, 100)


@st.composite
def dynamics(draw: st.DrawFn) -> Dynamic:
    low, init, high = sorted(draw(st.lists(exponents | st.floats(2.0**-10, 1e9, width=32), min_size=3, max_size=3)))
    return Dynamic(
        init_scale=init,
        growth_factor=draw(odd_factors),
        backoff_factor=draw(st.sampled_from([0.5, 0.3, 0.99]) | st.floats(0.01, 0.99)),
        growth_interval=draw(st.integers(1, 6)),
        hysteresis=draw(st.integers(1, 4)),
        refill=draw(st.sampled_from(["growth", "clean"])),
        min_scale=low,
        max_scale=high,
    )


@st.composite
def ladders(draw: st.DrawFn) -> Ladder:
    return Ladder(
        init_scale=draw(exponents),
        growth_factor=draw(odd_factors),
        backoff_factor=draw(st.sampled_from([0.5, 1.0, 0.1])),
        backoff_divisor=draw(st.sampled_from([1.0, 2.0, 3.0])),
        growth_interval=draw(st.integers(1, 6)),
        late=draw(st.integers(0, 2)),
        overshoot=draw(st.booleans()),
        hysteresis=draw(st.integers(1, 3)),
        refill=draw(st.sampled_from(["growth", "clean", "clean or backoff"])),
        fewest_credits=draw(st.sampled_from([0, 1, -(2**31) + 1])),
        floor=draw(st.sampled_from([0.0, 0.1, 1.0])),
        ceiling=draw(st.sampled_from([math.inf, 2.0**24, 1e5])),
        refuses_inf=draw(st.booleans()),
        arithmetic=draw(st.sampled_from(["float32", "float64", "mixed"])),
    )


bounds = {"min_scale": st.sampled_from([2.0**-24, 1.0]), "max_scale": st.sampled_from([2.0**20, 2.0**126])}
predictives = st.one_of(
    st.builds(
        Headroom,
        format=st.sampled_from(FORMATS),
        init_scale=st.sampled_from([1.0, 2.0**16]),
        margin_bits=st.integers(0, 4),
        leak=st.sampled_from([0.002, 0.01, 0.1]),
        recovery=st.sampled_from([0.0003, 0.1]),
        **bounds,
    ),
    st.builds(LogMax, init_scale=st.sampled_from([1.0, 2.0**16]), deviations=st.floats(0, 5), **bounds),
    st.builds(
        Histogram,
        init_scale=st.sampled_from([1.0, 2.0**16]),
        threshold=st.sampled_from([1e-7, 1e-3]),
        period=st.integers(1, 4),
        **bounds,
    ),
)
static_scales = st.floats(2.0**-20, 2.0**40).map(Static)
policy_lists = st.lists(dynamics() | ladders() | static_scales | st.just(NoScaling()), min_size=1, max_size=8)
peaks = st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 65504.0, 65520.0, 1e-30, 1e39, math.inf, math.nan])
steps = st.lists(st.tuples(st.booleans(), peaks, st.sampled_from([True, True, True, False])), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(policy_lists, steps)
def test_flags_give_each_policy_the_scales_it_has_alone(policies: list[Policy], known: list[Any]) -> None:
    found_inf, _, loss_finite = zip(*known, strict=True)
    assert_equals_stepping(policies, found_inf, None, loss_finite)


@settings(max_examples=60, deadline=None)
@given(policy_lists, steps, st.sampled_from(FORMATS))
def test_amax_gives_each_policy_the_scales_it_has_alone(policies: list[Policy], known: list[Any], fmt: Format) -> None:
    _, amax, loss_finite = zip(*known, strict=True)
    assert_equals_stepping(policies, None, amax, loss_finite, fmt)


@settings(max_examples=50, deadline=None)
@given(st.lists(predictives, min_size=1, max_size=6), steps, st.booleans(), st.randoms(use_true_random=False))
def test_predictive_policies_have_the_scales_they_have_alone(
    policies: list[Policy], known: list[Any], flags_rule: bool, random: Random
) -> None:
    found_inf, amax, loss_finite = zip(*known, strict=True)
    shares = [random.choice([0.0, 1e-8, 1e-5, 0.5]) for _ in known]
    assert_equals_stepping(policies, found_inf if flags_rule else None, amax, loss_finite, FP16, shares)


@settings(max_examples=30, deadline=None)
@given(st.lists(dynamics(), min_size=2, max_size=12), steps)
def test_one_policy_of_many_is_the_policy_alone(policies: list[Policy], known: list[Any]) -> None:
    found_inf, _, _ = zip(*known, strict=True)
    together = replay(policies, found_inf)
    for column, policy in enumerate(policies):
        alone = replay(policy, found_inf)
        np.testing.assert_array_equal(together.scales[:, column], alone.scales)
        assert together.summaries()[column] == alone.summaries()[0]


def test_policies_can_be_named_as_on_the_command_line() -> None:
    named = replay(["dynamic:growth_interval=2", Static(1024), "none"], found_inf=[0, 0, 1])
    assert named.policies == (Dynamic(growth_interval=2), Static(1024), NoScaling())
    assert replay("static:1024", found_inf=[0, 1]).scales.tolist() == [1024, 1024]


def test_one_policy_gives_arrays_of_one_dimension() -> None:
    run = replay(Dynamic(init_scale=8, growth_interval=2), found_inf=[0, 0, 1])
    assert run.scales.tolist() == [8, 16, 8]
    assert run.scales_before.tolist() == [8, 8, 16]
    assert run.skipped.tolist() == [False, False, True]
    assert run.stuck.tolist() == [False, False, False]
    assert run.scales.dtype == np.float32


def test_a_list_of_one_policy_gives_arrays_of_two_dimensions() -> None:
    run = replay([Static(8)], found_inf=[0, 1])
    assert run.scales.shape == run.scales_before.shape == run.skipped.shape == run.stuck.shape == (2, 1)
    assert len(run.states()) == len(run.summaries()) == 1


def test_results_stand_in_the_callers_order_whatever_runs_together() -> None:
    policies = [Static(2), Dynamic(init_scale=4), Static(8), NoScaling(), Dynamic(init_scale=16, refill="clean")]
    run = replay(policies, found_inf=[0])
    assert run.policies == tuple(policies)
    assert run.scales.tolist() == [[2, 4, 8, 1, 16]]
    assert [float(state.scale) for state in run.states()] == [2, 4, 8, 1, 16]
    assert [summary.final_scale for summary in run.summaries()] == [2, 4, 8, 1, 16]


def test_policies_may_come_from_a_generator() -> None:
    run = replay((Static(2.0**exponent) for exponent in range(3)), found_inf=[0])
    assert run.scales.tolist() == [[1, 2, 4]]


def test_policies_that_differ_in_numbers_only_run_as_one_vector() -> None:
    calls = []

    class Spy(Dynamic):
        def next(self, state: ScaleState, seen: Seen, xp: Any) -> ScaleState:
            calls.append(state.scale.shape)
            return super().next(state, seen, xp)

    spies = [Spy(init_scale=2**i, growth_factor=1 + i / 7, growth_interval=i, hysteresis=i) for i in range(1, 101)]
    replay(spies, found_inf=[0, 1, 0])
    assert calls == [(100,)] * 3


def test_float64_rules_keep_their_precision_beside_float32_ones() -> None:
    wide = Ladder(init_scale=1.0, growth_factor=1.1, growth_interval=1, arithmetic="float64")
    run = replay([wide, Static(0.1)], found_inf=[0, 0])
    assert run.scales[:, 0].tolist() == [1.1, 1.1 * 1.1]
    assert run.scales[:, 1].tolist() == [float(np.float32(0.1))] * 2


def test_counts_beyond_int32_keep_their_value() -> None:
    never, soon = (Ladder(init_scale=1.0, growth_interval=interval, overshoot=True) for interval in (2**40, 1))
    assert replay([never, soon], found_inf=[0, 0]).scales.tolist() == [[1, 2], [1, 4]]


def test_results_cannot_be_written_to() -> None:
    run = replay(Dynamic(), found_inf=[0])
    for array in (run.scales, run.scales_before, run.skipped, run.stuck):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_flags_rule_over_amax() -> None:
    run = replay(Static(1.0), found_inf=[1, 0], amax=[1.0, 1e6])
    assert run.skipped.tolist() == [True, False]


@pytest.mark.parametrize("flags", [[False, True], [0, 1], [0.0, 1.0], (0, 1), np.array([0, 1], np.uint8)])
def test_flags_of_any_numeric_type_mean_the_same(flags: Any) -> None:
    assert replay(Static(1.0), flags).skipped.tolist() == [False, True]


def test_a_step_overflows_when_amax_times_scale_reaches_the_threshold() -> None:
    threshold = FP16.overflow_threshold
    run = replay(Static(2.0), amax=[np.nextafter(threshold / 2, 0), threshold / 2])
    assert run.skipped.tolist() == [False, True]


def test_each_policy_overflows_by_its_own_scale() -> None:
    run = replay([Static(1), Static(1024), Static(65536)], amax=[1.0, 100.0, 1e5])
    assert run.skipped.tolist() == [[False, False, True], [False, True, True], [True, True, True]]


def test_the_format_decides_what_overflows() -> None:
    assert replay(Static(1), amax=[1e5], format="FP16").skipped.tolist() == [True]
    assert replay(Static(1), amax=[1e5], format=BF16).skipped.tolist() == [False]


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e39])
def test_an_amax_that_float32_cannot_hold_overflows_at_any_scale(bad: float) -> None:
    assert replay(Static(2.0**-100), amax=[1.0, bad]).skipped.tolist() == [False, True]


def test_a_policy_sees_an_infinite_amax_when_its_step_overflows() -> None:
    seen_by: list[Any] = []

    class Watching(NoScaling):
        needs: ClassVar[frozenset[str]] = frozenset({"finite", "amax"})

        def next(self, state: ScaleState, seen: Seen, xp: Any) -> ScaleState:
            seen_by.append((np.ravel(seen.finite).tolist(), seen.amax.tolist()))
            return replace(state, applied=state.applied + 1)

    replay([Watching(), Watching()], amax=[2.0, 1e6])
    replay(Watching(), found_inf=[0, 1], amax=[2.0, 2.0])
    assert seen_by == [
        ([True, True], [2.0, 2.0]),
        ([False, False], [math.inf, math.inf]),
        ([True], 2.0),
        ([False], math.inf),
    ]


def test_a_non_finite_loss_skips_the_step_and_leaves_the_scale_alone() -> None:
    run = replay(Dynamic(init_scale=8), found_inf=[1, 1], loss_finite=[0, 1])
    assert run.scales.tolist() == [8, 4]
    assert run.skipped.tolist() == [True, True]


def test_no_scaling_never_skips() -> None:
    run = replay(NoScaling(), found_inf=[1, 0, 1])
    assert not run.skipped.any()
    assert run.states()[0].applied == 3


def test_a_summary_has_the_run_in_numbers() -> None:
    policy = Dynamic(init_scale=4, growth_interval=1, min_scale=2, max_scale=8)
    run = replay(policy, found_inf=[0, 0, 1, 1, 1, 1, 0])
    assert run.scales.tolist() == [8, 8, 4, 2, 2, 2, 4]
    assert run.summaries() == (
        Summary(
            steps=7,
            skipped=4,
            final_scale=4.0,
            lowest_scale=2.0,
            highest_scale=8.0,
            steps_at_floor=3,
            steps_at_ceiling=2,
            first_stuck_step=4,
        ),
    )
    assert json.loads(json.dumps(asdict(run.summaries()[0])))["first_stuck_step"] == 4


def test_a_summary_of_a_run_never_stuck_says_none() -> None:
    summary = replay(Ladder(init_scale=4.0, floor=1.0, ceiling=4.0), found_inf=[0, 1]).summaries()[0]
    assert summary.first_stuck_step is None
    assert (summary.steps_at_floor, summary.steps_at_ceiling) == (0, 1)


def test_a_summary_of_a_policy_without_bounds_counts_no_step_at_them() -> None:
    summary = replay(Static(4.0), found_inf=[0, 1]).summaries()[0]
    assert (summary.steps_at_floor, summary.steps_at_ceiling, summary.first_stuck_step) == (0, 0, 1)


def test_a_policy_of_ones_own_that_is_no_dataclass_runs_too() -> None:
    class Half:
        needs: ClassVar[frozenset[str]] = frozenset()

        def start(self) -> ScaleState:
            return ScaleState(scale=np.float32(1))

        def next(self, state: ScaleState, seen: Seen, xp: Any) -> ScaleState:
            return replace(state, scale=state.scale * 0.5)

        def to_dict(self) -> dict[str, Any]:
            return {}

    assert replay([Half(), Half()], found_inf=[0, 0]).scales.tolist() == [[0.5, 0.5], [0.25, 0.25]]


def test_the_presets_of_all_systems_replay_together_as_each_does_alone() -> None:
    rows = json.loads((Path(__file__).parents[1] / "data" / "peer_scale_sequences.json").read_text())
    presets = [preset(row["system"], row["class"], **row["config"]) for row in rows]
    random = np.random.default_rng(0)
    amax = np.exp(random.normal(size=120)).tolist()
    shares = random.choice([0.0, 1e-8, 1e-5], 120).tolist()
    assert_equals_stepping(presets, (random.random(120) < 0.2).tolist(), amax, [True] * 120, FP16, shares)
