"""`Headroom`: each sentence of its rule, and how it fares on streams of gradients."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from benchmarks.streams import CHANGES, Stream, named, side_by_side, simulate
from tests.stories import next_of

from gradscale import FP8_E4M3, FP16, Dynamic, Seen
from gradscale.policies.headroom import Headroom, HeadroomState

LIMIT = FP16.max / 4
"""Where the ceiling of a `Headroom()` starts: two bits below the format's maximum."""

OVERFLOW = Seen(finite=np.bool_(False))


def clean(amax: float) -> Seen:
    return Seen(amax=np.float32(amax))


def after(policy: Headroom, *steps: Seen, start: HeadroomState | None = None) -> HeadroomState:
    """Returns the state after the steps."""
    state = policy.start() if start is None else start
    for step in steps:
        state = next_of(policy, state, step)
    return state


def scales(policy: Headroom, *steps: Seen) -> list[float]:
    """Returns the exponents of the scales after each step."""
    state, exponents = policy.start(), []
    for step in steps:
        state = next_of(policy, state, step)
        exponents.append(math.log2(state.scale))
    return exponents


def assert_state(actual: HeadroomState, **expected: Any) -> None:
    """Asserts the whole state: what is not named must be as before the first step, and numbers as float32."""
    start = Headroom().start()
    whole = {field.name: getattr(start, field.name) for field in fields(start)} | expected
    assert {name: getattr(actual, name).item() for name in whole} == {
        name: getattr(start, name).dtype.type(value).item() for name, value in whole.items()
    }


def test_it_starts_at_its_init_scale_with_the_ceiling_two_bits_below_the_maximum() -> None:
    assert_state(
        Headroom(init_scale=8).start(),
        scale=8.0,
        peak=0.0,
        ceiling=LIMIT,
        recovery_factor=1.0,
        failed_scale=0.0,
        backoff_factor=2**-16,
    )


def test_the_first_gradient_sets_the_peak_and_the_largest_power_of_two_that_leaves_the_margin() -> None:
    assert 1.5 * 2**13 <= LIMIT < 1.5 * 2**14
    assert_state(after(Headroom(), clean(1.5)), scale=2**13, peak=1.5, ceiling=LIMIT, backoff_factor=0.5, applied=1)


@pytest.mark.parametrize(("margin_bits", "exponent"), [(0, 15), (1, 14), (2, 13), (15, 0)])
def test_a_margin_of_one_more_bit_lowers_the_scale_by_one(margin_bits: int, exponent: int) -> None:
    assert scales(Headroom(margin_bits=margin_bits), clean(1.5)) == [exponent]


def test_the_format_decides_what_fits() -> None:
    assert scales(Headroom(format=FP8_E4M3), clean(1.5)) == [math.floor(math.log2(448 / 4 / 1.5))]


def test_a_larger_gradient_lowers_the_scale_at_once() -> None:
    assert scales(Headroom(), clean(1.0), clean(64.0)) == [13, 7]


def test_a_smaller_gradient_leaves_the_scale_until_the_peak_has_leaked() -> None:
    policy = Headroom(leak=0.25)
    assert after(policy, clean(1.0), clean(0.5), clean(0.5)).peak == np.float32(0.75) * np.float32(0.75)
    assert scales(policy, clean(1.0), clean(0.5), clean(0.5), clean(0.5)) == [13, 14, 14, 14]


@pytest.mark.parametrize(("bits", "pace"), [(8, 1), (9, 4), (11, 16), (15, 64)])
def test_a_peak_far_above_the_gradients_leaks_faster(bits: int, pace: int) -> None:
    state = after(Headroom(leak=2**-10), clean(1.0), clean(2.0**-bits))
    assert state.peak == 1 - pace * 2**-10


def test_a_leak_of_zero_never_forgets() -> None:
    assert after(Headroom(leak=0), clean(1.0), *[clean(2.0**-20)] * 50).peak == 1.0


def test_a_scale_that_goes_far_up_stops_short_of_its_aim_and_doubles_from_there() -> None:
    assert scales(Headroom(init_scale=1), *[clean(2.0**-10)] * 6) == [19, 20, 21, 22, 23, 23]
    assert scales(Headroom(init_scale=1, climb_bits=0), clean(2.0**-10)) == [23]


def test_overflows_in_a_row_lower_the_scale_by_more_each_time() -> None:
    policy = Headroom(min_scale=2.0**-40)
    start = after(policy, clean(1.0))
    exponents = [math.log2(after(policy, *[OVERFLOW] * count, start=start).scale) for count in range(7)]
    assert exponents == [13, 12, 10, 6, -2, -18, -34]


def test_an_overflow_is_remembered_by_the_scale_that_failed() -> None:
    state = after(Headroom(), clean(1.0), OVERFLOW, OVERFLOW)
    assert_state(
        state,
        scale=2**10,
        peak=1.0,
        failed_scale=2**12,
        backoff_factor=2**-4,
        ceiling=LIMIT,
        applied=1,
        skipped=2,
        consecutive_skips=2,
    )


def test_an_overflow_that_the_gradients_do_not_explain_lowers_the_ceiling_to_half_of_what_failed() -> None:
    state = after(Headroom(recovery=0, leak=0), clean(1.0), OVERFLOW, OVERFLOW, clean(1.0))
    assert_state(
        state, scale=2**11, peak=1.0, ceiling=2**11, recovery_factor=0.5, backoff_factor=0.5, applied=2, skipped=2
    )


def test_an_overflow_that_larger_gradients_explain_leaves_the_ceiling_alone() -> None:
    state = after(Headroom(recovery=0), clean(1.0), *[OVERFLOW] * 4, clean(2.0**12))
    assert_state(
        state, scale=0.5, peak=2**12, ceiling=LIMIT, recovery_factor=1.0, backoff_factor=0.5, applied=2, skipped=4
    )


def test_an_overflow_that_larger_gradients_explain_in_part_costs_the_rest() -> None:
    state = after(Headroom(recovery=0), clean(1.0), OVERFLOW, OVERFLOW, clean(2.0))
    assert (state.ceiling, state.recovery_factor) == (2.0 * 2**11, 0.5)


def test_only_the_first_clean_step_after_an_overflow_judges_it() -> None:
    state = after(Headroom(recovery=0), clean(1.0), OVERFLOW, clean(1.0), clean(1.0))
    assert (state.ceiling, state.recovery_factor, state.failed_scale) == (2**12, 0.5, 0)


def test_a_lowered_ceiling_rises_by_its_share_and_stops_at_the_limit() -> None:
    policy = Headroom(recovery=2.0**-4, leak=0)
    state = after(policy, clean(1.0), OVERFLOW, clean(1.0))
    assert state.ceiling == 2**12 * (1 + 2**-5)  # recovery_factor is 1/2
    assert after(policy, *[clean(1.0)] * 100, start=state).ceiling == LIMIT


def test_each_proof_of_the_ceiling_halves_its_recovery_down_to_a_32nd() -> None:
    policy = Headroom(recovery=0)
    state, factors = after(policy, clean(1.0)), []
    for _ in range(7):
        state = after(policy, OVERFLOW, clean(1.0), start=state)
        factors.append(float(state.recovery_factor))
    assert factors == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32, 1 / 32]


def test_a_ceiling_too_low_to_be_believed_recovers_fast_whatever_its_recovery_factor() -> None:
    policy = Headroom(recovery=2.0**-10, leak=0)
    state = after(policy, clean(1.0), *[OVERFLOW] * 5, clean(1.0))
    assert (state.ceiling, state.recovery_factor) == (2.0**-3 * (1 + 2**-5), 0.5)


def test_the_ceiling_never_comes_down_so_far_that_the_peak_turns_subnormal() -> None:
    policy = Headroom(recovery=0, min_scale=2.0**-100)
    assert after(policy, clean(1.0), *[OVERFLOW] * 9, clean(1.0)).ceiling == FP16.smallest_normal


def test_before_any_gradient_an_overflow_lowers_the_scale_by_16_bits() -> None:
    assert scales(Headroom(init_scale=2.0**60), OVERFLOW, OVERFLOW, OVERFLOW) == [44, 28, 12]
    assert scales(Headroom(format=FP8_E4M3), OVERFLOW, OVERFLOW) == [16 - 9, 16 - 18]


def test_the_first_gradient_is_judged_by_the_scale_that_failed_before_it() -> None:
    state = after(Headroom(recovery=0), OVERFLOW, clean(2.0**-6))
    assert (state.ceiling, state.scale) == (2.0**-6 * 2**15, 2**11)
    assert scales(Headroom(), OVERFLOW, *[clean(2.0**-6)] * 6)[-1] == 15


def test_zeros_before_any_gradient_raise_the_scale_by_16_bits_and_no_higher_than_48() -> None:
    zero = clean(0.0)
    assert scales(Headroom(init_scale=1), zero, zero, zero, zero, zero) == [16, 32, 48, 48, 48]
    assert scales(Headroom(init_scale=2.0**60), zero) == [60]


def test_zeros_after_a_gradient_change_nothing_but_the_counter() -> None:
    state = after(Headroom(), clean(1.0), clean(0.0), clean(1e-45))
    assert_state(state, scale=2**13, peak=1.0, backoff_factor=0.5, ceiling=LIMIT, applied=3)


def test_zeros_at_a_scale_that_hides_the_peak_itself_raise_the_scale() -> None:
    state = after(Headroom(), clean(1.0), *[OVERFLOW] * 6)
    assert state.scale == 2.0**-24
    assert after(Headroom(), clean(0.0), start=state).scale == 2.0**-8


@pytest.mark.parametrize("amax", [math.nan, math.inf])
def test_a_magnitude_that_is_no_magnitude_is_ignored(amax: float) -> None:
    assert_state(
        after(Headroom(), clean(1.0), clean(amax)), scale=2**13, peak=1.0, backoff_factor=0.5, ceiling=LIMIT, applied=2
    )
    assert_state(after(Headroom(), clean(amax)), ceiling=LIMIT, applied=1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"margin_bits": 1.5}, r"`margin_bits` must be a whole number from 0 to 15. Received: margin_bits=1.5"),
        ({"margin_bits": -1}, r"`margin_bits` must be a whole number from 0 to 15. Received: margin_bits=-1"),
        ({"climb_bits": 16}, r"`climb_bits` must be a whole number from 0 to 15. Received: climb_bits=16"),
        ({"climb_bits": math.nan}, r"`climb_bits` must be a whole number from 0 to 15. Received: climb_bits=nan"),
        ({"leak": 1}, r"`leak` must be at least 0 and below 1. Received: leak=1"),
        ({"leak": 1 - 1e-9}, r"`leak` must be at least 0 and below 1. Received: leak=0.999999999"),
        ({"recovery": -0.1}, r"`recovery` must be at least 0 and below 1. Received: recovery=-0.1"),
        ({"recovery": math.nan}, r"`recovery` must be at least 0 and below 1. Received: recovery=nan"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Headroom(**setting)


def test_settings_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`margin_bits` must be a number. Received: margin_bits='2'"):
        Headroom(margin_bits="2")  # type: ignore[arg-type]


def flat(steps: int, level: float, shift: float = 1.0) -> Stream:
    """Returns a gradient that stays at `level` for a sixth of the steps and then jumps by `shift`."""
    amax = np.full((steps, 1), level)
    amax[steps // 6 :] *= shift
    return Stream(amax, np.ones_like(amax))


@pytest.mark.parametrize("exponent", range(-20, 61, 8))
def test_it_finds_the_scale_within_ten_steps_wherever_it_starts(exponent: int) -> None:
    run = simulate(Headroom(init_scale=2.0**exponent), flat(60, 2.0**-6))
    assert run.overflowed.sum() <= 3
    assert (run.bits_low[10:] < 3.1).all()
    assert not run.overflowed[10:].any()


def test_a_rise_of_20_bits_costs_five_steps_and_leaves_nothing_behind() -> None:
    run = simulate(Headroom(), flat(6000, 2.0**-6, 2.0**20))
    assert run.overflowed.sum() <= 5
    assert (run.bits_low > 10).sum() <= 5
    assert run.bits_low[-1] < 3.1


def test_a_fall_of_20_bits_is_made_up_for_in_hundreds_of_steps_and_not_in_thousands() -> None:
    run = simulate(Headroom(), flat(6000, 2.0**-6, 2.0**-20))
    assert run.overflowed.sum() == 0
    assert (run.bits_low > 10).sum() <= 349
    assert run.bits_low[-1] < 3.1


def test_tiny_gradients_get_a_scale_above_2_to_the_36_at_once() -> None:
    run = simulate(Headroom(), named("tiny: x 1e-7", 100, 8))
    assert (run.scales[1] >= 2.0**36).all()
    assert not run.overflowed.any()


def test_a_lasting_gap_of_8_bits_to_gradients_nobody_sees_costs_a_few_steps() -> None:
    run = simulate(Headroom(), named("8 bits hidden", 6000, 8))
    assert run.overflowed.sum(0).max() <= 5
    assert np.median(run.bits_low) < 4


def test_two_networks_that_take_turns_under_one_scale_do_not_thrash_it() -> None:
    run = simulate(Headroom(), named("GAN", 3000, 8))
    assert run.overflowed.sum(0).max() <= 6
    assert not run.overflowed[1000:].mean(0).max() > 0.002


def test_spikes_of_a_hundred_times_in_one_step_of_a_hundred_are_skipped_rarely() -> None:
    run = simulate(Headroom(), named("spikes: 1% x 100", 3000, 8))
    assert run.overflowed.sum(0).mean() <= 4  # of about 30 spikes


def test_a_storm_of_overflows_no_scale_could_prevent_is_recovered_from() -> None:
    run = simulate(Headroom(), named("storm of 10 overflows", 3000, 4))
    assert (run.overflowed.sum(0) == 10).all()
    assert (run.bits_low[2000:] < 15).all()


def test_over_all_streams_it_skips_less_than_half_of_what_dynamic_skips() -> None:
    streams = side_by_side([named(name, 1500, 2, seed) for seed, name in enumerate(CHANGES)])
    skips = [int(simulate(policy, streams).overflowed.sum()) for policy in (Headroom(), Dynamic(min_scale=2.0**-24))]
    assert skips[0] < skips[1] / 2
