"""`LogMax`: its model, its rule, and how it fares on streams of gradients."""

import math
from typing import Any

import numpy as np
import pytest
from benchmarks.streams import Stream, named, simulate
from tests.stories import next_of

from gradscale import Seen
from gradscale.policies.arithmetic import log2_linear
from gradscale.policies.log_max import LogMax, LogMaxState

OVERFLOW = Seen(finite=np.bool_(False))


def clean(amax: float) -> Seen:
    return Seen(amax=np.float32(amax))


def after(policy: LogMax, *steps: Seen) -> LogMaxState:
    state = policy.start()
    for step in steps:
        state = next_of(policy, state, step)
    return state


def test_it_starts_knowing_nothing_but_a_variance_of_one() -> None:
    state = LogMax(init_scale=8).start()
    assert (state.scale, state.peak, state.ceiling) == (8, 0, 2.0**126)
    assert (state.mean, state.variance, state.observations) == (0, 1, 0)


def test_the_mean_of_few_steps_is_their_plain_mean_in_bits() -> None:
    state = after(LogMax(), clean(2.0**-3), clean(2.0**-5), clean(2.0**-7))
    assert (state.mean, state.observations) == (-5, 3)


def test_the_variance_of_few_steps_is_their_plain_variance_with_the_one_it_started_with() -> None:
    sizes = [-3.0, -5.0, -7.0, 2.0]
    state = after(LogMax(), *(clean(2.0**size) for size in sizes))
    assert state.variance == pytest.approx((1 + len(sizes) * np.var(sizes)) / (len(sizes) + 1), rel=1e-6)


def test_the_mean_forgets_by_beta1_and_the_variance_by_beta2_once_there_are_many_steps() -> None:
    policy = LogMax(beta1=0.5, beta2=0.75)
    before = after(policy, *[clean(1.0)] * 50)
    state = next_of(policy, before, clean(16.0))
    assert before.mean == 0
    assert state.mean == 2
    assert state.variance == pytest.approx(0.75 * before.variance + 0.25 * 4 * 2, rel=1e-6)


def test_the_peak_lies_the_deviations_above_the_mean() -> None:
    state = after(LogMax(deviations=3), *[clean(2.0**-8), clean(2.0**-4)] * 500, clean(2.0**-8))
    assert log2_linear(state.peak, np) == pytest.approx(state.mean + 3 * math.sqrt(state.variance), abs=1e-4)
    assert state.mean == pytest.approx(-6, abs=0.05)
    assert state.variance == pytest.approx(4, rel=0.01)


def test_a_gradient_above_the_mean_stands_in_for_it() -> None:
    policy = LogMax(deviations=0)
    state = after(policy, *[clean(1.0)] * 50, clean(2.0**10))
    assert (state.peak, state.scale) == (2**10, 2**5)


def test_more_deviations_lower_the_scale() -> None:
    story = [clean(2.0**-8), clean(2.0**-4)] * 20
    found = [after(LogMax(deviations=deviations), *story).scale for deviations in (0, 2, 4)]
    assert found[0] > found[1] > found[2]


def test_an_overflow_backs_off_and_leaves_the_model_alone() -> None:
    before = after(LogMax(), clean(1.0), clean(0.5))
    state = next_of(LogMax(), before, OVERFLOW)
    assert state.scale == before.scale / 16
    assert (state.mean, state.variance, state.observations) == (before.mean, before.variance, before.observations)


def test_an_overflow_lowers_the_ceiling() -> None:
    before = after(LogMax(), *[clean(1.0)] * 100)
    state = before
    for step in (OVERFLOW, *[clean(1.0)] * 20):
        state = next_of(LogMax(), state, step)
    assert state.scale == before.scale / 2**12
    assert state.ceiling < before.ceiling


def test_a_lasting_gap_of_8_bits_to_gradients_nobody_sees_costs_a_few_steps() -> None:
    run = simulate(LogMax(), named("8 bits hidden", 3000, 8))
    assert run.overflowed.sum(0).max() <= 8
    assert np.median(run.bits_low) < 8


def test_steady_gradients_overflow_hardly_ever_and_stay_near_the_top() -> None:
    run = simulate(LogMax(), named("steady", 3000, 8))
    assert run.overflowed.sum(0).mean() <= 1
    assert np.median(run.bits_low) < 3


@pytest.mark.parametrize(("shift", "skips"), [(2.0**20, 6), (2.0**-20, 0)])
def test_a_shift_of_20_bits_is_followed(shift: float, skips: int) -> None:
    amax = np.full((3000, 1), 2.0**-6)
    amax[500:] *= shift
    run = simulate(LogMax(), Stream(amax, np.ones_like(amax)))
    assert run.overflowed.sum() <= skips
    assert (run.bits_low > 10).sum() < 1500
    assert run.bits_low[-1] < 10


@pytest.mark.parametrize("exponent", [-20, 0, 16, 40, 60])
def test_it_finds_the_scale_within_ten_steps_wherever_it_starts(exponent: int) -> None:
    run = simulate(LogMax(init_scale=2.0**exponent), named("steady", 60, 4))
    assert run.overflowed.sum(0).max() <= 4
    assert (run.bits_low[10:] < 8).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"beta1": 1}, r"`beta1` must be at least 0 and below 1. Received: beta1=1"),
        ({"beta2": -0.5}, r"`beta2` must be at least 0 and below 1. Received: beta2=-0.5"),
        ({"deviations": -1}, r"`deviations` must be between 0 and 100. Received: deviations=-1"),
        ({"deviations": math.nan}, r"`deviations` must be between 0 and 100. Received: deviations=nan"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogMax(**setting)
