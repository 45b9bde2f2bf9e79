"""`Histogram`: its rule, how it settles, and how it fares on streams of gradients."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from benchmarks.streams import named, simulate
from tests.stories import next_of

from gradscale import FP8_E5M2, FP16, Seen
from gradscale.policies.histogram import Histogram, HistogramState

QUIET = Seen(upper_share=np.float32(0))
LOUD = Seen(upper_share=np.float32(0.01))
OVERFLOW = Seen(finite=np.bool_(False))


def after(policy: Histogram, *steps: Seen, start: HistogramState | None = None) -> HistogramState:
    state = policy.start() if start is None else start
    for step in steps:
        state = next_of(policy, state, step)
    return state


def assert_state(actual: HistogramState, **expected: Any) -> None:
    """Asserts the whole state: what is not named must be at its default."""
    whole = {field.name: field.default for field in fields(HistogramState)} | expected
    assert {name: getattr(actual, name).item() for name in whole} == whole


def test_it_starts_at_its_init_scale_with_a_retry_interval_of_a_period() -> None:
    assert_state(Histogram(init_scale=8, period=5).start(), scale=8.0, retry_interval=5)


def test_a_quiet_step_is_counted() -> None:
    assert_state(after(Histogram(init_scale=8, period=5), QUIET), scale=8.0, retry_interval=5, clean_steps=1, applied=1)


def test_the_scale_doubles_at_the_last_quiet_step_of_the_period_and_not_before() -> None:
    policy = Histogram(init_scale=8, period=3)
    assert_state(after(policy, QUIET, QUIET), scale=8.0, retry_interval=3, clean_steps=2, applied=2)
    assert_state(after(policy, QUIET, QUIET, QUIET), scale=16.0, retry_interval=3, applied=3)


def test_a_share_above_the_threshold_halves_the_scale_at_once_and_the_step_is_applied() -> None:
    state = after(Histogram(init_scale=8, period=3), QUIET, LOUD)
    assert_state(state, scale=4.0, failed_scale=8.0, retry_interval=3, applied=2)


def test_a_share_at_the_threshold_is_still_quiet() -> None:
    policy = Histogram(init_scale=8, period=1, threshold=0.01)
    assert_state(after(policy, LOUD), scale=16.0, retry_interval=1, applied=1)


def test_an_overflow_lowers_the_scale_by_the_edge() -> None:
    state = after(Histogram(init_scale=8, period=3), OVERFLOW)
    assert_state(state, scale=0.5, failed_scale=8.0, retry_interval=3, skipped=1, consecutive_skips=1)


@pytest.mark.parametrize(("edge", "scale"), [(0.3, 2.0), (0.9, 4.0), (0.5, 4.0)])
def test_an_edge_that_is_no_power_of_two_lowers_by_the_next_below(edge: float, scale: float) -> None:
    assert after(Histogram(init_scale=8, edge=edge), OVERFLOW).scale == scale


def test_a_scale_that_fails_again_is_left_alone_for_twice_as_long() -> None:
    policy = Histogram(init_scale=8, period=2)
    again = after(policy, LOUD, QUIET, QUIET, LOUD)
    assert_state(again, scale=4.0, failed_scale=8.0, retry_interval=4, applied=4)
    assert after(policy, *[QUIET] * 3, start=again).scale == 4
    assert after(policy, *[QUIET] * 4, start=again).scale == 8


def test_the_retry_interval_never_exceeds_the_longest() -> None:
    policy = Histogram(init_scale=8, period=2, longest_wait=6)
    state = after(policy, LOUD)
    for _ in range(4):
        state = after(policy, *[QUIET] * int(state.retry_interval), LOUD, start=state)
    assert (state.retry_interval, state.scale) == (6, 4)


def test_rises_below_the_scale_that_failed_take_a_period_each() -> None:
    policy = Histogram(init_scale=256, period=2)
    state = after(policy, LOUD, QUIET, QUIET, LOUD, QUIET, QUIET, QUIET, QUIET, OVERFLOW)
    assert (state.scale, state.failed_scale, state.retry_interval) == (16, 256, 8)
    assert [after(policy, *[QUIET] * n, start=state).scale for n in (2, 4, 6, 13, 14)] == [32, 64, 128, 128, 256]


def test_a_scale_that_failed_and_then_lasts_is_forgiven() -> None:
    policy = Histogram(init_scale=8, period=2)
    again = after(policy, LOUD, QUIET, QUIET, LOUD)
    lasted = after(policy, *[QUIET] * 8, start=again)
    assert_state(lasted, scale=16.0, failed_scale=0.0, retry_interval=2, applied=12)


def test_a_fall_below_the_scale_that_failed_keeps_the_retry_interval() -> None:
    assert after(Histogram(period=2), LOUD, LOUD, LOUD, OVERFLOW).retry_interval == 2


def test_a_share_that_is_nan_changes_nothing() -> None:
    state = after(Histogram(init_scale=8, period=1), Seen(upper_share=np.float32(math.nan)))
    assert_state(state, scale=8.0, retry_interval=1, applied=1)


def test_the_edge_is_given_as_a_magnitude_of_the_format() -> None:
    assert Histogram().edge_magnitude == FP16.max / 16
    assert Histogram(format=FP8_E5M2, edge=0.5).edge_magnitude == FP8_E5M2.max / 2


def test_it_comes_to_rest_where_popart_would_go_up_and_down_for_ever() -> None:
    run = simulate(Histogram(), named("steady", 3000, 8))
    moves = (np.diff(run.scales[1000:], axis=0) != 0).sum(0)
    assert moves.max() <= 30  # PopART: 2,000
    assert not run.overflowed.any()


def test_it_follows_a_rise_and_a_fall() -> None:
    for name in ("up 20 bits at once", "down 20 bits at once"):
        run = simulate(Histogram(), named(name, 3000, 4))
        assert run.overflowed.sum(0).max() <= 5
        assert (run.bits_low[-500:] < 10).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"edge": 1}, r"`edge` must be at least 0 and below 1. Received: edge=1"),
        ({"edge": 0}, r"`edge` must be at least 2\*\*-24 of the format's maximum. Received: edge=0"),
        ({"threshold": math.nan}, r"`threshold` must be at least 0 and below 1. Received: threshold=nan"),
        ({"period": 0}, r"`period` must be between 1 and 2\*\*31 - 1. Received: period=0"),
        (
            {"longest_wait": 8},
            r"between `period` and 2\*\*30. Received: period=16, longest_wait=8",
        ),
        ({"longest_wait": 2**31 - 1}, r"`longest_wait` must lie between `period` and 2\*\*30"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Histogram(**setting)
