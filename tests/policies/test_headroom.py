"""`Headroom`: each sentence of its rule, and how it fares on streams of gradients."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from benchmarks.streams import CHANGES, Stream, named, simulate
from tests.stories import next_of

from gradscale import BF16, FP8_E4M3, FP8_E5M2, FP16, Dynamic, Format, Seen
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
        level=0.0,
        ceiling=LIMIT,
        recovery_factor=1.0,
        failed_scale=0.0,
    )


def test_the_first_gradient_sets_the_peak_and_the_largest_power_of_two_that_leaves_the_margin() -> None:
    assert 1.5 * 2**13 <= LIMIT < 1.5 * 2**14
    state = after(Headroom(), clean(1.5))
    assert_state(state, scale=2**13, peak=1.5, level=1.5, ceiling=LIMIT, clean_steps=1, applied=1)


@pytest.mark.parametrize(("margin_bits", "exponent"), [(0, 15), (1, 14), (2, 13), (15, 0)])
def test_a_margin_of_one_more_bit_lowers_the_scale_by_one(margin_bits: int, exponent: int) -> None:
    assert scales(Headroom(margin_bits=margin_bits), clean(1.5)) == [exponent]


def test_the_format_decides_what_fits() -> None:
    assert scales(Headroom(format=FP8_E4M3), clean(1.5)) == [math.floor(math.log2(448 / 4 / 1.5))]


def test_a_larger_gradient_lowers_the_scale_at_once() -> None:
    assert scales(Headroom(), clean(1.0), clean(64.0)) == [13, 7]


def test_a_smaller_gradient_leaves_the_scale_until_the_peak_has_leaked() -> None:
    policy = Headroom(leak=0.25, rise_bits=0)
    assert after(policy, clean(1.0), clean(0.5), clean(0.5)).peak == np.float32(0.75) * np.float32(0.75)
    assert scales(policy, clean(1.0), clean(0.5), clean(0.5), clean(0.5)) == [13, 14, 14, 14]


@pytest.mark.parametrize(("bits", "pace"), [(8, 1), (9, 4), (11, 16), (15, 64)])
def test_a_peak_far_above_the_gradients_leaks_faster(bits: int, pace: int) -> None:
    state = after(Headroom(leak=2**-10), clean(1.0), clean(2.0**-bits))
    assert state.peak == 1 - pace * 2**-10


def test_a_leak_of_zero_never_forgets() -> None:
    assert after(Headroom(leak=0), clean(1.0), *[clean(2.0**-20)] * 50).peak == 1.0


def test_a_scale_rises_to_its_target_at_once_when_that_is_three_bits_higher_and_else_stays() -> None:
    # The peak falls as fast as the level, by a quarter: by 2.1 bits in 5 steps, and it was 0.99 below a power of two.
    steps = clean(16.0), *[clean(1.0)] * 5
    assert scales(Headroom(leak=0.25), *steps) == [9, 9, 9, 9, 9, 12]
    assert scales(Headroom(leak=0.25, rise_bits=1), *steps) == [9, 10, 10, 11, 11, 12]


def test_at_the_first_gradient_the_scale_goes_to_its_target_however_near_that_is() -> None:
    assert scales(Headroom(init_scale=2.0**22), clean(2.0**-10)) == [23]


def test_after_an_overflow_the_scale_goes_to_its_target_however_near_that_is() -> None:
    assert scales(Headroom(init_scale=2.0**41), OVERFLOW, clean(2.0**-10)) == [21, 23]


def test_an_overflow_lowers_the_scale_by_half_of_the_range_and_then_by_halves_where_the_peak_is_subnormal() -> None:
    policy = Headroom(min_scale=2.0**-40)
    start = after(policy, clean(1.0))
    exponents = [math.log2(after(policy, *[OVERFLOW] * count, start=start).scale) for count in range(6)]
    assert exponents == [13, -7, -14, -15, -16, -17]
    assert FP16.smallest_normal == 2.0**-14


def test_an_overflow_leaves_the_peak_of_a_narrow_format_17_binades() -> None:
    policy = Headroom(FP8_E5M2, min_scale=2.0**-40)
    start = after(policy, clean(1.0))
    exponents = [math.log2(after(policy, *[OVERFLOW] * count, start=start).scale) for count in range(4)]
    assert exponents == [13, 1, -14, -15]
    assert FP8_E5M2.smallest_subnormal == 2.0 ** (1 - 17)


def test_an_overflow_is_remembered_by_the_scale_that_failed() -> None:
    state = after(Headroom(), clean(1.0), OVERFLOW, OVERFLOW)
    assert_state(
        state,
        scale=2.0**-14,
        peak=1.0,
        level=1.0,
        failed_scale=2.0**-7,
        ceiling=LIMIT,
        clean_steps=1,
        applied=1,
        skipped=2,
        consecutive_skips=2,
    )


def test_an_overflow_that_the_gradients_do_not_explain_lowers_the_ceiling_to_8_bits_below_what_failed() -> None:
    state = after(Headroom(recovery=0, leak=0), clean(1.0), OVERFLOW, clean(1.0))
    assert_state(
        state,
        scale=2**5,
        peak=1.0,
        level=1.0,
        ceiling=2**5,
        recovery_factor=0.5,
        clean_steps=1,
        applied=2,
        skipped=1,
    )


def test_an_overflow_that_larger_gradients_explain_leaves_the_ceiling_alone() -> None:
    state = after(Headroom(recovery=0), clean(1.0), OVERFLOW, clean(2.0**12))
    # The level rises by at most 16 * 0.002, as the gradients are 12 bits above it.
    level = np.float32(0.002) * np.float32(16) + np.float32(1)
    assert_state(state, scale=2, peak=2**12, level=level, ceiling=LIMIT, clean_steps=1, applied=2, skipped=1)


def test_gradients_explain_an_overflow_only_if_they_reach_the_maximum_at_the_scale_that_failed() -> None:
    policy = Headroom(recovery=0)
    assert after(policy, clean(1.0), OVERFLOW, clean(4.0)).ceiling < LIMIT  # 4 * 2**13 is 32768
    assert after(policy, clean(1.0), OVERFLOW, clean(8.0)).ceiling == LIMIT


@pytest.mark.parametrize(("format", "bits"), [(FP16, 8), (FP8_E5M2, 6), (FP8_E4M3, 3), (BF16, 8)])
def test_what_an_overflow_teaches_is_at_most_a_fifth_of_the_binades(format: Format, bits: int) -> None:
    policy = Headroom(format, recovery=0, leak=0)
    start = after(policy, clean(1.0))
    assert after(policy, OVERFLOW, clean(1.0), start=start).scale == start.scale / 2**bits


def test_an_overflow_at_a_scale_too_low_to_be_the_cause_teaches_nothing() -> None:
    state = after(Headroom(recovery=0, leak=0), clean(1.0), clean(1.0), OVERFLOW, OVERFLOW, clean(1.0))
    assert_state(state, scale=2**13, peak=1.0, level=1.0, ceiling=LIMIT, clean_steps=1, applied=3, skipped=2)


def test_when_that_happens_again_at_once_the_scale_stays_8_bits_lower() -> None:
    policy = Headroom(recovery=0, leak=0)
    start = after(policy, clean(1.0), clean(1.0), OVERFLOW, OVERFLOW, clean(1.0))
    state = after(policy, OVERFLOW, OVERFLOW, clean(1.0), start=start)
    assert (state.scale, state.ceiling, state.recovery_factor) == (2**5, np.float32(LIMIT) / 2**8, 0.5)


def test_zeros_after_an_overflow_raise_the_scale_by_10_bits_and_first_to_what_is_left_below_the_one_that_failed() -> (
    None
):
    zero = clean(0.0)
    assert scales(Headroom(), OVERFLOW, zero, zero, zero) == [-4, 6, 15, 25]


@pytest.mark.parametrize("gap", range(0, 32, 2))
def test_no_gap_to_gradients_nobody_sees_makes_it_overflow_again_and_again(gap: int) -> None:
    stream = named("steady", 500, 8)
    run = simulate(Headroom(), Stream(stream.amax, stream.hidden * 2.0**gap))
    assert run.overflowed.sum(0).max() <= 20


def test_only_the_first_clean_step_after_an_overflow_judges_it() -> None:
    state = after(Headroom(recovery=0), clean(1.0), OVERFLOW, clean(1.0), clean(1.0))
    assert (state.ceiling, state.recovery_factor, state.failed_scale) == (2**5, 0.5, 0)


def test_a_lowered_ceiling_rises_by_its_share_and_stops_at_the_limit() -> None:
    policy = Headroom(recovery=2.0**-4, leak=0)
    state = after(policy, clean(1.0), OVERFLOW, clean(1.0))
    assert state.ceiling == 2**5 * (1 + 2**-5)  # recovery_factor is 1/2
    assert after(policy, *[clean(1.0)] * 300, start=state).ceiling == LIMIT


def test_each_proof_of_the_ceiling_halves_its_recovery_down_to_a_32nd() -> None:
    policy = Headroom(recovery=0)
    state, factors = after(policy, clean(1.0)), []
    for _ in range(7):
        state = after(policy, OVERFLOW, clean(1.0), start=state)
        factors.append(float(state.recovery_factor))
    assert factors == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32, 1 / 32]


def test_the_ceiling_stays_within_two_lessons_of_the_limit_unless_every_other_step_overflows() -> None:
    policy = Headroom(recovery=0, leak=0)
    state = after(policy, clean(1.0), clean(1.0), *[OVERFLOW, clean(1.0), clean(1.0)] * 9)
    assert state.ceiling == np.float32(LIMIT) / 2**16
    again_and_again = after(policy, clean(1.0), *[OVERFLOW, clean(1.0)] * 9)
    assert again_and_again.ceiling == FP16.smallest_subnormal


def test_a_first_lesson_may_start_far_below_what_the_gradients_allow() -> None:
    # A loss in FP16 overflows at 2**16, whatever its gradients are: 2**-14 alone allows 2**27.
    assert scales(Headroom(), OVERFLOW, clean(2.0**-14)) == [-4, 8]


@pytest.mark.parametrize(("format", "bits"), [(FP8_E5M2, 12), (FP8_E4M3, 6)])
def test_the_ceiling_of_a_narrow_format_stays_within_two_shorter_lessons(format: Format, bits: int) -> None:
    policy = Headroom(format, recovery=0, leak=0)
    state = after(policy, clean(1.0), clean(1.0), *[OVERFLOW, clean(1.0), clean(1.0)] * 9)
    assert state.ceiling == policy.start().ceiling / 2**bits


def test_a_spike_does_not_move_the_level_and_so_leaves_what_overflows_taught() -> None:
    policy = Headroom(recovery=0)
    learned = after(policy, clean(1.0), OVERFLOW, clean(1.0))
    spiked = after(policy, clean(2.0**6), start=learned)
    assert (spiked.peak, spiked.ceiling) == (2.0**6, learned.ceiling)
    assert spiked.level == np.float32(1) + np.float32(0.002)
    assert spiked.scale == learned.scale / 2  # the level is slightly higher, and 2**5 was just allowed


def test_the_level_falls_by_a_quarter_a_step_so_that_the_scale_rises_where_all_gradients_fall() -> None:
    policy = Headroom(recovery=0, leak=0.5, rise_bits=0)
    learned = after(policy, clean(1.0), OVERFLOW, clean(1.0))
    assert after(policy, clean(2.0**-10), start=learned).level == 0.75
    fallen = after(policy, *[clean(2.0**-10)] * 40, start=learned)
    assert fallen.level == 2.0**-10
    assert fallen.scale == learned.scale * 2**10


def test_before_any_gradient_an_overflow_lowers_the_scale_by_half_of_the_range() -> None:
    assert scales(Headroom(init_scale=2.0**60), OVERFLOW, OVERFLOW, OVERFLOW) == [40, 20, 0]
    assert scales(Headroom(format=FP8_E4M3), OVERFLOW, OVERFLOW) == [16 - 9, 16 - 18]


def test_the_first_gradient_is_judged_by_the_scale_that_failed_before_it() -> None:
    state = after(Headroom(recovery=0), OVERFLOW, clean(2.0**-6))
    assert (state.ceiling, state.scale) == (2.0**-6 * 2**8, 2**8)
    assert scales(Headroom(), OVERFLOW, clean(2.0**6)) == [-4, 7]


def test_zeros_before_any_gradient_raise_the_scale_by_half_of_the_range_and_no_higher_than_48() -> None:
    zero = clean(0.0)
    assert scales(Headroom(init_scale=1), zero, zero, zero, zero, zero) == [20, 40, 48, 48, 48]
    assert scales(Headroom(init_scale=2.0**60), zero) == [60]


def test_zeros_after_a_gradient_change_nothing_but_the_counter() -> None:
    state = after(Headroom(), clean(1.0), clean(0.0), clean(1e-45))
    assert_state(state, scale=2**13, peak=1.0, level=1.0, ceiling=LIMIT, clean_steps=1, applied=3)


def test_zeros_at_a_scale_that_hides_the_peak_itself_raise_the_scale() -> None:
    state = after(Headroom(), clean(1.0), *[OVERFLOW] * 12)
    assert state.scale == 2.0**-24
    assert after(Headroom(), clean(0.0), start=state).scale == 2.0**-14


@pytest.mark.parametrize("amax", [math.nan, math.inf])
def test_a_magnitude_that_is_no_magnitude_is_ignored(amax: float) -> None:
    state = after(Headroom(), clean(1.0), clean(amax))
    assert_state(state, scale=2**13, peak=1.0, level=1.0, ceiling=LIMIT, clean_steps=1, applied=2)
    assert_state(after(Headroom(), clean(amax)), ceiling=LIMIT, applied=1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"margin_bits": 1.5}, r"`margin_bits` must be a whole number from 0 to 15. Received: margin_bits=1.5"),
        ({"margin_bits": -1}, r"`margin_bits` must be a whole number from 0 to 15. Received: margin_bits=-1"),
        ({"rise_bits": 16}, r"`rise_bits` must be a whole number from 0 to 15. Received: rise_bits=16"),
        ({"rise_bits": math.nan}, r"`rise_bits` must be a whole number from 0 to 15. Received: rise_bits=nan"),
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
def test_it_finds_the_scale_within_four_steps_wherever_it_starts(exponent: int) -> None:
    run = simulate(Headroom(init_scale=2.0**exponent), flat(60, 2.0**-6))
    assert run.overflowed.sum() <= 2
    assert (run.bits_low[4:] < 5.1).all()
    assert not run.overflowed[4:].any()


def test_a_rise_of_20_bits_costs_one_step_and_leaves_nothing_behind() -> None:
    run = simulate(Headroom(), flat(6000, 2.0**-6, 2.0**20))
    assert run.overflowed.sum() == 1
    assert (run.bits_low > 10).sum() <= 1
    assert run.bits_low[-1] < 3.1


def test_a_fall_of_20_bits_is_made_up_for_in_hundreds_of_steps_and_not_in_thousands() -> None:
    run = simulate(Headroom(), flat(6000, 2.0**-6, 2.0**-20))
    assert run.overflowed.sum() == 0
    assert (run.bits_low > 10).sum() < 1000
    assert run.bits_low[-1] < 5.1


def test_tiny_gradients_get_a_scale_above_2_to_the_36_at_once() -> None:
    run = simulate(Headroom(), named("tiny: x 1e-7", 100, 8))
    assert (run.scales[1] >= 2.0**36).all()
    assert not run.overflowed.any()


@pytest.mark.parametrize("stream", ["3 bits hidden", "8 bits hidden"])
def test_a_lasting_gap_to_gradients_nobody_sees_costs_a_step_or_two(stream: str) -> None:
    run = simulate(Headroom(), named(stream, 6000, 8, seed=3))
    assert run.overflowed.sum(0).max() <= 2
    assert run.overflowed.sum(0).mean() < 1.5
    assert np.median(run.bits_low) < 10


@pytest.mark.parametrize("stream", ["GAN", "hidden at random", "spikes: 1% x 100", "rare spikes: 0.2% x 1000"])
def test_what_comes_again_and_again_costs_two_or_three_steps_and_not_one_each_time(stream: str) -> None:
    run = simulate(Headroom(), named(stream, 6000, 8, seed=3))
    assert run.overflowed.sum(0).mean() <= 2
    assert run.overflowed.sum(0).max() <= 3


def test_a_storm_of_overflows_no_scale_could_prevent_leaves_nothing_behind() -> None:
    run = simulate(Headroom(), named("storm of 10 overflows", 3000, 4))
    assert (run.overflowed.sum(0) == 10).all()
    assert (run.bits_low[520:] < 9).all()


@pytest.mark.parametrize("stream", CHANGES)
def test_on_no_stream_it_skips_more_than_dynamic(stream: str) -> None:
    streams = named(stream, 6000, 16, seed=3)
    skips = [simulate(policy, streams).overflowed.sum() for policy in (Headroom(), Dynamic(min_scale=2.0**-24))]
    assert skips[0] <= skips[1]
