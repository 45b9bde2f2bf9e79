"""The policies that need no statistics: each sentence of their rules, their settings, and what they promise."""

import json
import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
from tests.stories import BAD_LOSS, BAD_LOSS_ALONE, CLEAN, OVERFLOW, after, next_of

from gradscale import CheckOnly, Dynamic, Headroom, Histogram, LogMax, NoScaling, ScaleState, Seen, Static, preset
from gradscale.engine.host import scalar, vector
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE
from gradscale.policies.contract import backed_off, counted, verdict
from gradscale.policies.static import multiplies
from gradscale.record import numbers


def assert_state(actual: ScaleState, **expected: Any) -> None:
    """Asserts the whole state: what is not named must be as in a state before its first step."""
    whole = {field.name: field.default for field in fields(ScaleState)} | expected
    assert {name: getattr(actual, name).item() for name in whole} == whole
    assert all(getattr(actual, field.name).dtype == field.metadata["dtype"] for field in fields(ScaleState))


def test_dynamic_starts_at_its_init_scale_with_its_hysteresis_credits() -> None:
    assert_state(Dynamic(init_scale=8, hysteresis=3).start(), scale=8.0, credits=3)


def test_dynamic_has_torchs_defaults_and_bounds() -> None:
    assert Dynamic() == Dynamic(
        init_scale=65536.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        hysteresis=1,
        refill="growth",
        min_scale=1.0,
        max_scale=2.0**126,
    )


def test_a_clean_step_is_counted_and_leaves_the_scale() -> None:
    assert_state(after(Dynamic(init_scale=8), "c"), scale=8.0, clean_steps=1, applied=1)


def test_the_scale_grows_at_the_last_clean_step_of_the_interval_and_not_before() -> None:
    policy = Dynamic(init_scale=8, growth_interval=3)
    assert_state(after(policy, "cc"), scale=8.0, clean_steps=2, applied=2)
    assert_state(after(policy, "ccc"), scale=16.0, clean_steps=0, applied=3)


def test_the_interval_starts_again_after_a_growth() -> None:
    policy = Dynamic(init_scale=8, growth_interval=2)
    assert_state(after(policy, "ccc"), scale=16.0, clean_steps=1, applied=3)
    assert_state(after(policy, "cccc"), scale=32.0, applied=4)


def test_the_scale_grows_by_its_own_factor() -> None:
    assert_state(after(Dynamic(init_scale=8, growth_interval=1, growth_factor=1.5), "c"), scale=12.0, applied=1)


def test_an_overflow_backs_off_at_once_and_is_counted_as_skipped() -> None:
    state = after(Dynamic(init_scale=8), "o")
    assert_state(state, scale=4.0, credits=0, skipped=1, consecutive_skips=1)


def test_the_scale_backs_off_by_its_own_factor() -> None:
    state = after(Dynamic(init_scale=8, backoff_factor=0.25), "o")
    assert_state(state, scale=2.0, credits=0, skipped=1, consecutive_skips=1)


def test_overflows_in_a_row_each_back_off() -> None:
    state = after(Dynamic(init_scale=8), "oo")
    assert_state(state, scale=2.0, credits=0, skipped=2, consecutive_skips=2)


def test_an_overflow_starts_the_interval_again() -> None:
    state = after(Dynamic(init_scale=8, growth_interval=3), "ccocc")
    assert_state(state, scale=4.0, credits=0, clean_steps=2, applied=4, skipped=1)
    grown = after(Dynamic(init_scale=8, growth_interval=3), "ccoccc")
    assert_state(grown, scale=8.0, clean_steps=0, applied=5, skipped=1)


def test_a_clean_step_ends_the_run_of_skips() -> None:
    assert_state(after(Dynamic(init_scale=8), "ooc"), scale=2.0, credits=0, clean_steps=1, applied=1, skipped=2)


def test_hysteresis_forgives_all_but_the_last_overflow() -> None:
    policy = Dynamic(init_scale=8, hysteresis=3)
    assert_state(after(policy, "o"), scale=8.0, credits=2, skipped=1, consecutive_skips=1)
    assert_state(after(policy, "oo"), scale=8.0, credits=1, skipped=2, consecutive_skips=2)
    assert_state(after(policy, "ooo"), scale=4.0, credits=0, skipped=3, consecutive_skips=3)


def test_with_its_credits_spent_every_further_overflow_backs_off() -> None:
    state = after(Dynamic(init_scale=8, hysteresis=2), "ooo")
    assert_state(state, scale=2.0, credits=0, skipped=3, consecutive_skips=3)


def test_a_forgiven_overflow_starts_the_interval_again_too() -> None:
    state = after(Dynamic(init_scale=8, hysteresis=2, growth_interval=2), "coc")
    assert_state(state, scale=8.0, credits=1, clean_steps=1, applied=2, skipped=1)


def test_growth_refills_the_credits_and_a_clean_step_alone_does_not() -> None:
    policy = Dynamic(init_scale=8, hysteresis=2, growth_interval=2, refill="growth")
    assert_state(after(policy, "oc"), scale=8.0, credits=1, clean_steps=1, applied=1, skipped=1)
    assert_state(after(policy, "occ"), scale=16.0, credits=2, applied=2, skipped=1)


def test_any_clean_step_refills_the_credits_where_the_policy_says_so() -> None:
    policy = Dynamic(init_scale=8, hysteresis=2, refill="clean")
    assert_state(after(policy, "oc"), scale=8.0, credits=2, clean_steps=1, applied=1, skipped=1)
    assert_state(after(policy, "ooc"), scale=4.0, credits=2, clean_steps=1, applied=1, skipped=2)


@pytest.mark.parametrize("letter", ["b", "l"])
def test_a_non_finite_loss_is_skipped_and_changes_nothing_but_the_counters(letter: str) -> None:
    policy = Dynamic(init_scale=8, hysteresis=2, growth_interval=3, refill="clean")
    before = after(policy, "occ")
    assert_state(before, scale=8.0, credits=2, clean_steps=2, applied=2, skipped=1)
    expected = {"scale": 8.0, "credits": 2, "clean_steps": 2, "applied": 2, "skipped": 2, "consecutive_skips": 1}
    assert_state(after(policy, letter, before), **expected)


@pytest.mark.parametrize("letter", ["b", "l"])
def test_a_non_finite_loss_does_not_back_off_even_with_all_credits_spent(letter: str) -> None:
    state = after(Dynamic(init_scale=8), "o" + letter)
    assert_state(state, scale=4.0, credits=0, skipped=2, consecutive_skips=2)


@pytest.mark.parametrize("letter", ["b", "l"])
def test_a_non_finite_loss_does_not_grow_even_with_the_interval_passed(letter: str) -> None:
    state = ScaleState(scale=np.float32(8), clean_steps=np.int32(1500))
    expected = {"scale": 8.0, "clean_steps": 1500, "skipped": 1, "consecutive_skips": 1}
    assert_state(after(Dynamic(growth_interval=100), letter, state), **expected)


def test_a_clean_step_after_a_non_finite_loss_still_ends_the_interval() -> None:
    assert_state(after(Dynamic(init_scale=8, growth_interval=2), "cbc"), scale=16.0, applied=2, skipped=1)


def test_the_scale_stops_at_its_ceiling() -> None:
    policy = Dynamic(init_scale=8, growth_interval=1, growth_factor=4, max_scale=20)
    assert_state(after(policy, "c"), scale=20.0, applied=1)
    assert_state(after(policy, "cc"), scale=20.0, applied=2)


def test_growth_at_the_ceiling_still_refills_the_credits() -> None:
    policy = Dynamic(init_scale=8, growth_interval=1, max_scale=8, hysteresis=2)
    assert_state(after(policy, "oc"), scale=8.0, credits=2, applied=1, skipped=1)


def test_the_scale_stops_at_its_floor() -> None:
    policy = Dynamic(init_scale=8, backoff_factor=0.25, min_scale=3)
    assert_state(after(policy, "o"), scale=3.0, credits=0, skipped=1, consecutive_skips=1)


def test_an_overflow_at_the_floor_is_stuck_and_one_that_reaches_it_is_not() -> None:
    policy = Dynamic(init_scale=2, min_scale=1)
    assert_state(after(policy, "o"), scale=1.0, credits=0, skipped=1, consecutive_skips=1)
    assert_state(after(policy, "oo"), scale=1.0, credits=0, skipped=2, consecutive_skips=2, stuck=True)


def test_a_forgiven_overflow_at_the_floor_is_not_stuck() -> None:
    state = after(Dynamic(init_scale=1, min_scale=1, hysteresis=2), "o")
    assert_state(state, scale=1.0, credits=1, skipped=1, consecutive_skips=1)


def test_a_clean_step_at_the_floor_ends_being_stuck() -> None:
    assert_state(after(Dynamic(init_scale=1), "oc"), scale=1.0, credits=0, clean_steps=1, applied=1, skipped=1)


def test_a_non_finite_loss_at_the_floor_is_not_stuck() -> None:
    assert_state(after(Dynamic(init_scale=1), "b"), scale=1.0, skipped=1, consecutive_skips=1)


def test_growth_near_the_largest_scale_never_overflows_float32() -> None:
    policy = Dynamic(init_scale=HIGHEST_SCALE, growth_interval=1, growth_factor=3e38)
    assert_state(after(policy, "ccc"), scale=HIGHEST_SCALE, applied=3)


def test_a_state_from_elsewhere_is_brought_within_the_bounds() -> None:
    policy = Dynamic(init_scale=8, min_scale=4, max_scale=16)
    assert after(policy, "c", ScaleState(scale=np.float32(2.0**100))).scale == 16
    assert after(policy, "c", ScaleState(scale=np.float32(2.0**-100))).scale == 4


def test_a_counter_past_a_lowered_interval_grows_at_the_next_clean_step() -> None:
    state = replace(Dynamic().start(), scale=np.float32(8), clean_steps=np.int32(1500))
    assert_state(after(Dynamic(growth_interval=100), "c", state), scale=16.0, clean_steps=0, applied=1)


def test_the_state_before_a_step_is_left_as_it_was() -> None:
    policy = Dynamic(init_scale=8)
    before = policy.start()
    after(policy, "oc", before)
    assert_state(before, scale=8.0, credits=1)


def test_a_policy_cannot_be_changed_once_built() -> None:
    with pytest.raises(FrozenInstanceError):
        Dynamic().init_scale = 2.0  # pyright: ignore[reportAttributeAccessIssue]


def test_static_never_changes_its_scale_and_counts_steps() -> None:
    assert_state(after(Static(1024), "ccoc"), scale=1024.0, applied=3, skipped=1)


def test_static_is_stuck_at_any_overflow_and_not_at_a_bad_loss() -> None:
    assert_state(after(Static(8), "o"), scale=8.0, skipped=1, consecutive_skips=1, stuck=True)
    assert_state(after(Static(8), "b"), scale=8.0, skipped=1, consecutive_skips=1)


def test_a_check_alone_counts_and_skips_at_scale_one() -> None:
    assert_state(after(CheckOnly(), "ccoc"), scale=1.0, applied=3, skipped=1)
    assert_state(after(CheckOnly(), "o"), scale=1.0, skipped=1, consecutive_skips=1, stuck=True)
    assert_state(after(CheckOnly(), "b"), scale=1.0, skipped=1, consecutive_skips=1)


def test_only_a_scale_that_may_differ_from_one_multiplies() -> None:
    found = {type(policy): multiplies(policy) for policy in (Dynamic(), Static(8.0), CheckOnly(), NoScaling())}
    assert found == {Dynamic: True, Static: True, CheckOnly: False, NoScaling: False}


def test_no_scaling_applies_every_step_at_scale_one() -> None:
    assert_state(after(NoScaling(), "cobl"), scale=1.0, applied=4)


def test_policies_say_what_they_read() -> None:
    assert Dynamic.needs == Static.needs == CheckOnly.needs == {"finite", "loss_finite"}
    assert NoScaling.needs == frozenset()


def test_a_non_finite_loss_is_neither_clean_nor_an_overflow() -> None:
    assert [tuple(map(bool, verdict(seen, np))) for seen in (CLEAN, OVERFLOW, BAD_LOSS, BAD_LOSS_ALONE)] == [
        (True, False),
        (False, True),
        (False, False),
        (False, False),
    ]


def test_counting_changes_the_counters_and_the_given_fields() -> None:
    before = vector(after(Dynamic(init_scale=8), "oc"))
    state = scalar(counted(before, np.bool_(False), np, scale=np.float32(1)))
    assert_state(state, scale=1.0, credits=0, clean_steps=1, applied=1, skipped=2, consecutive_skips=1)


LAST = np.int32(2**31 - 1)


@pytest.mark.parametrize(
    "policy",
    [
        Dynamic(growth_interval=2**31 - 1),
        Static(8.0),
        CheckOnly(),
        NoScaling(),
        Headroom(),
        LogMax(),
        Histogram(),
        preset("torch"),
        preset("megatron"),
        preset("chainer"),
        preset("popart"),
        preset("openseq2seq", "LogMaxScaler"),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_counters_stop_at_the_largest_int32_and_the_state_still_loads(policy: Any) -> None:
    full = {"clean_steps": LAST, "applied": LAST, "skipped": LAST, "consecutive_skips": LAST}
    before = replace(policy.start(), **full)
    for finite in (True, False):
        state = next_of(policy, before, Seen(finite=np.bool_(finite), amax=np.float32(1)))
        assert (int(state.applied), int(state.skipped)) == (LAST, LAST)
        assert int(state.consecutive_skips) in (0, LAST)
        assert int(state.clean_steps) in (0, LAST)
        assert type(state).from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_credits_without_a_limit_stop_at_the_lowest_that_loads() -> None:
    policy = preset("megatron")
    state = next_of(policy, replace(policy.start(), credits=-LAST), Seen(finite=np.bool_(False)))
    assert int(state.credits) == -LAST
    assert type(state).from_dict(state.to_dict()) == state


def test_backing_off_for_a_retry_lowers_the_scale_whatever_the_credits_and_counts_nothing() -> None:
    policy = Dynamic(init_scale=8, hysteresis=3, growth_interval=5)
    state = scalar(backed_off(policy, vector(after(policy, "oc")), vector(OVERFLOW), np))
    assert_state(state, scale=4.0, credits=2, clean_steps=0, applied=1, skipped=1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"init_scale": 0},
            ValueError,
            r"`init_scale` must lie between 2\*\*-126 and 2\*\*126.*Received: init_scale=0",
        ),
        ({"init_scale": -1.0}, ValueError, r"`init_scale` must lie between .* Received: init_scale=-1.0"),
        ({"init_scale": math.inf}, ValueError, "`init_scale` must lie between .* Received: init_scale=inf"),
        ({"init_scale": math.nan}, ValueError, "`init_scale` must lie between .* Received: init_scale=nan"),
        ({"init_scale": 10**400}, ValueError, "`init_scale` must lie between"),
        ({"init_scale": "8"}, TypeError, r"`init_scale` must be a number. Received: init_scale='8' \(str\)"),
        ({"init_scale": True}, TypeError, r"`init_scale` must be a number. Received: init_scale=True \(bool\)"),
        ({"init_scale": None}, TypeError, "`init_scale` must be a number"),
        ({"init_scale": np.array([1.0])}, TypeError, "`init_scale` must be a number"),
        ({"min_scale": 0.0}, ValueError, "`min_scale` must lie between .* Received: min_scale=0.0"),
        ({"max_scale": 2.0**127}, ValueError, "`max_scale` must lie between .* Received: max_scale="),
        ({"init_scale": 0.5}, ValueError, "between `min_scale` and `max_scale`.*min_scale=1.0, init_scale=0.5"),
        ({"max_scale": 1024}, ValueError, "between `min_scale` and `max_scale`.*max_scale=1024"),
        (
            {"init_scale": 1 + 1e-9, "min_scale": 1 + 1e-9, "max_scale": 1 + 1e-9},
            ValueError,
            "must be a float32 number between",
        ),
        ({"growth_factor": 1}, ValueError, "`growth_factor` must be greater than 1.* Received: growth_factor=1. For a"),
        ({"growth_factor": 0.5}, ValueError, "`growth_factor` must be greater than 1.*use `Static`"),
        ({"growth_factor": 1 + 1e-9}, ValueError, "`growth_factor` must be greater than 1 .* as a float32"),
        ({"growth_factor": math.inf}, ValueError, "`growth_factor` must be .* finite"),
        ({"growth_factor": 1e39}, ValueError, "`growth_factor` must be .* finite"),
        ({"growth_factor": 10**400}, ValueError, "`growth_factor` must be .* finite"),
        ({"growth_factor": -(10**400)}, ValueError, "`growth_factor` must be"),
        ({"growth_factor": math.nan}, ValueError, "`growth_factor` must be"),
        ({"growth_factor": "2"}, TypeError, "`growth_factor` must be a number. Received: growth_factor='2'"),
        ({"backoff_factor": 0}, ValueError, "`backoff_factor` must be between 0 and 1.* Received: backoff_factor=0"),
        ({"backoff_factor": 1.0}, ValueError, "`backoff_factor` must be between 0 and 1.*use `Static`"),
        ({"backoff_factor": 1 - 1e-9}, ValueError, "`backoff_factor` must be between 0 and 1"),
        ({"backoff_factor": 1e-60}, ValueError, "`backoff_factor` must be between 0 and 1"),
        ({"backoff_factor": -0.5}, ValueError, "`backoff_factor` must be between 0 and 1"),
        ({"backoff_factor": math.nan}, ValueError, "`backoff_factor` must be between 0 and 1"),
        ({"backoff_factor": None}, TypeError, "`backoff_factor` must be a number"),
        ({"growth_interval": 0}, ValueError, "`growth_interval` must be between 1 and .* Received: growth_interval=0"),
        ({"growth_interval": 2**31}, ValueError, "`growth_interval` must be between 1 and"),
        ({"growth_interval": 2.0}, TypeError, r"`growth_interval` must be an integer. .*growth_interval=2.0 \(float\)"),
        ({"growth_interval": True}, TypeError, "`growth_interval` must be an integer"),
        ({"hysteresis": 0}, ValueError, "`hysteresis` must be between 1 and .* Received: hysteresis=0"),
        ({"hysteresis": "1"}, TypeError, "`hysteresis` must be an integer"),
        ({"refill": "never"}, ValueError, "`refill` must be 'growth' or 'clean'. Received: refill='never'"),
    ],
)
def test_dynamic_refuses_settings_it_cannot_keep(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Dynamic(**arguments)


@pytest.mark.parametrize(
    ("scale", "error"), [(0, ValueError), (math.inf, ValueError), (math.nan, ValueError), ("8", TypeError)]
)
def test_static_refuses_what_cannot_be_a_scale(scale: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`scale` must"):
        Static(scale)


@pytest.mark.parametrize("scale", [LOWEST_SCALE, HIGHEST_SCALE])
def test_both_ends_of_the_range_are_legal_scales(scale: float) -> None:
    assert Static(scale).start().scale == scale
    assert Dynamic(init_scale=scale, min_scale=scale, max_scale=scale).start().scale == scale


def test_settings_of_numpy_types_mean_the_same_as_pythons() -> None:
    given_in_numpy = Dynamic(
        init_scale=np.float64(8),
        growth_factor=np.float64(2),
        backoff_factor=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        growth_interval=np.int64(1),  # pyright: ignore[reportArgumentType]
        hysteresis=np.int16(2),  # pyright: ignore[reportArgumentType]
    )
    assert given_in_numpy == Dynamic(init_scale=8, growth_factor=2, backoff_factor=0.5, growth_interval=1, hysteresis=2)
    assert {type(value) for value in numbers(given_in_numpy).values()} == {int, float}
    assert_state(after(given_in_numpy, "c"), scale=16.0, credits=2, applied=1)


def test_settings_are_rounded_to_float32_so_that_they_mean_the_same_everywhere() -> None:
    policy = Dynamic(growth_factor=1.1, backoff_factor=0.3)
    assert policy.growth_factor == float(np.float32(1.1))
    assert policy.backoff_factor == float(np.float32(0.3))
    assert Static(0.1).scale == float(np.float32(0.1))


def test_bounds_are_rounded_inwards_to_float32() -> None:
    policy = Dynamic(init_scale=3.3, min_scale=3.3, max_scale=1e6 + 0.05)
    assert policy.min_scale == policy.init_scale == 3.3000001907348633
    assert policy.max_scale == 1000000.0
    assert float(np.float32(3.3)) < 3.3 < policy.min_scale
    assert float(np.float32(1e6 + 0.05)) > 1e6 + 0.05 > policy.max_scale
