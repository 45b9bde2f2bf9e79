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

TOP = FP16.max / 4
"""The highest scale for a peak of 1: two bits below the format's maximum."""

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


def test_it_starts_at_its_init_scale_without_a_ceiling() -> None:
    assert_state(Headroom(init_scale=8).start(), scale=8.0, peak=0.0, ceiling=2.0**126)


def test_the_first_gradient_sets_the_peak_and_the_second_the_largest_power_of_two_that_leaves_the_margin() -> None:
    assert 1.5 * 2**13 <= TOP < 1.5 * 2**14
    assert_state(after(Headroom(), clean(1.5)), scale=2**9, peak=1.5, clean_steps=1, applied=1)
    assert_state(after(Headroom(), clean(1.5), clean(1.5)), scale=2**13, peak=1.5, clean_steps=2, applied=2)


@pytest.mark.parametrize(("margin_bits", "exponent"), [(0, 15), (1, 14), (2, 13), (15, 0)])
def test_a_margin_of_one_more_bit_lowers_the_scale_by_one(margin_bits: int, exponent: int) -> None:
    assert scales(Headroom(margin_bits=margin_bits), clean(1.5), clean(1.5)) == [exponent - 4, exponent]


def test_the_format_decides_what_fits() -> None:
    exponent = math.floor(math.log2(448 / 4 / 1.5))
    assert scales(Headroom(format=FP8_E4M3), clean(1.5), clean(1.5)) == [exponent - 2, exponent]


def test_a_larger_gradient_lowers_the_scale_at_once() -> None:
    assert scales(Headroom(), clean(1.0), clean(1.0), clean(64.0)) == [9, 13, 7]


SETTLED = [clean(1.0)] * 4
"""After so many clean steps, the peak no longer halves."""


def test_each_of_the_three_steps_after_the_first_halves_the_peak() -> None:
    small = clean(2.0**-6)
    peaks = [after(Headroom(leak=0), clean(1.0), *[small] * count).peak for count in range(6)]
    assert peaks == [1, 0.5, 0.25, 0.125, 0.125, 0.125]


def test_a_smaller_gradient_leaves_the_scale_until_the_peak_has_leaked() -> None:
    policy = Headroom(leak=2**-4)
    assert after(policy, *SETTLED, clean(0.5), clean(0.5)).peak == (15 / 16) ** 2
    assert scales(policy, *SETTLED, *[clean(0.5)] * 11) == [9, 13, 13, 13, *[14] * 11]


@pytest.mark.parametrize(("format", "bits"), [(FP16, 8), (FP8_E5M2, 8), (FP8_E4M3, 4)])
def test_a_peak_more_than_two_lessons_above_the_gradients_leaks_8_times_faster(format: Format, bits: int) -> None:
    policy = Headroom(format, leak=2**-10)
    assert after(policy, *SETTLED, clean(2.0**-bits)).peak == 1 - 2**-10
    assert after(policy, *SETTLED, clean(2.0 ** -(bits + 1))).peak == 1 - 8 * 2**-10


def test_a_leak_of_zero_never_forgets() -> None:
    assert after(Headroom(leak=0), *SETTLED, *[clean(2.0**-20)] * 50).peak == 1.0


CALM = [clean(1.0)] * 16
"""After so many clean steps, an overflow costs three lessons."""

SOON = CALM[:2]


def test_an_overflow_early_or_soon_after_another_divides_the_scale_by_16_and_puts_the_ceiling_there() -> None:
    state = after(Headroom(), *SOON, OVERFLOW)
    assert_state(state, scale=2**9, peak=1.0, ceiling=2**9, applied=2, skipped=1, consecutive_skips=1)
    assert after(Headroom(), *CALM[1:], OVERFLOW).scale == 2**9


def test_a_later_one_lowers_both_by_12_bits() -> None:
    state = after(Headroom(leak=0), *CALM, OVERFLOW)
    assert_state(state, scale=2**1, peak=1.0, ceiling=2**1, applied=16, skipped=1, consecutive_skips=1)


def test_each_further_overflow_lowers_both_by_4_bits() -> None:
    policy = Headroom(min_scale=2.0**-40)
    states = [after(policy, *CALM, *[OVERFLOW] * count) for count in range(6)]
    assert [math.log2(state.scale) for state in states] == [13, 1, -3, -7, -11, -15]
    assert [math.log2(state.ceiling) for state in states[1:]] == [1, -3, -7, -11, -15]


def test_an_overflow_after_a_calm_lowers_neither_further_than_half_of_the_range_below_the_top() -> None:
    # The ceiling is 17 bits below the top when the gradients are calm again: 12 bits more would be 29.
    policy = Headroom(recovery=0, leak=0)
    low = after(policy, *CALM, *[OVERFLOW] * 2, *CALM)
    assert math.log2(low.scale) == -3
    state = after(policy, OVERFLOW, start=low)
    assert math.log2(state.scale) == math.log2(state.ceiling) == -7
    assert 2**-7 < TOP / 2**20 < 2**-6


@pytest.mark.parametrize(("format", "bits"), [(FP16, 4), (FP8_E5M2, 4), (FP8_E4M3, 2), (BF16, 4)])
def test_an_overflow_costs_an_eighth_of_the_binades_or_4_bits_and_after_a_calm_three_times_as_many(
    format: Format, bits: int
) -> None:
    policy = Headroom(format)
    for steps, times in ((SOON, 1), (CALM, 3)):
        start = after(policy, *steps)
        assert after(policy, OVERFLOW, start=start).scale == start.scale / 2 ** (bits * times)


def test_after_an_overflow_the_scale_stays_at_the_ceiling() -> None:
    policy = Headroom(recovery=0, leak=0)
    state = after(policy, *SOON, OVERFLOW, clean(1.0), clean(1.0))
    assert_state(state, scale=2**9, peak=1.0, ceiling=2**9, clean_steps=2, applied=4, skipped=1)


def test_larger_gradients_lower_the_scale_further_whatever_the_ceiling() -> None:
    large = clean(2.0**16)
    assert scales(Headroom(), *CALM, OVERFLOW, large, large)[-3:] == [1, -7, -3]


def test_a_clean_step_raises_the_ceiling_by_its_share_of_the_top() -> None:
    policy = Headroom(recovery=2.0**-10, leak=0)
    state = after(policy, *SOON, OVERFLOW, clean(1.0))
    assert state.ceiling == 2**9 + TOP * 2**-10


def test_the_ceiling_stops_where_it_reaches_the_top() -> None:
    policy = Headroom(recovery=2.0**-10, leak=0)
    ended = after(policy, clean(1.0), OVERFLOW, *[clean(1.0)] * 2000)
    assert (ended.scale, ended.ceiling) == (2**13, pytest.approx(TOP, rel=2.0**-9))
    assert after(policy, clean(1.0), start=ended).ceiling == ended.ceiling


def test_a_very_low_ceiling_rises_by_a_sixteenth_a_step() -> None:
    policy = Headroom(leak=0)
    low = after(policy, *SOON, *[OVERFLOW, clean(1.0)] * 4)
    assert math.log2(low.scale) == -3
    assert after(policy, clean(1.0), start=low).ceiling == low.ceiling * (1 + 1 / 16)


@pytest.mark.parametrize(("format", "half"), [(FP16, 20), (FP8_E5M2, 16)])
def test_a_ceiling_more_than_half_of_the_range_below_the_top_doubles_at_each_clean_step(
    format: Format, half: int
) -> None:
    policy = Headroom(format, recovery=0, leak=0)
    low = after(policy, clean(1.0), *[OVERFLOW] * 6)
    ceilings = [after(policy, *[clean(1.0)] * count, start=low).ceiling for count in range(20)]
    lowest = format.max / 4 / 2**half
    doubled = [ceiling for ceiling in ceilings if ceiling < lowest]
    assert len(doubled) >= 2
    assert ceilings == [low.ceiling * 2 ** min(count, len(doubled)) for count in range(20)]


def test_where_the_gradients_fall_the_ceiling_rises_with_what_they_allow() -> None:
    policy = Headroom(leak=0.1)
    learned = after(policy, clean(1.0), OVERFLOW, clean(1.0))
    fallen = after(policy, *[clean(2.0**-20)] * 200, start=learned)
    assert fallen.scale > learned.scale * 2**8


@pytest.mark.parametrize(("gap", "share"), [(2, 0.01), (6, 0.01), (10, 0.01), (12, 0.02), (14, 0.05), (18, 0.05)])
def test_a_gap_to_gradients_nobody_sees_costs_a_share_of_the_steps_that_grows_with_it(gap: int, share: float) -> None:
    stream = named("steady", 500, 8)
    run = simulate(Headroom(), Stream(stream.amax, stream.hidden * 2.0**gap))
    assert run.overflowed[20:].mean(0).max() <= share


@pytest.mark.parametrize(
    ("gap", "fp16", "e5m2"), [(5, 22, 18), (20, 21, 17), (50, 18, 15), (100, 14, 13), (200, 12, 12), (600, 10, 11)]
)
@pytest.mark.parametrize("format", [FP16, FP8_E5M2])
def test_a_batch_that_comes_back_costs_a_few_steps_and_from_so_many_bits_on_one_each_time(
    format: Format, gap: int, fp16: int, e5m2: int
) -> None:
    bits, times = fp16 if format is FP16 else e5m2, 10
    amax = np.tile(2.0 ** (-8 + np.arange(8) / 8), (times * gap, 1))
    for size, least, most in ((bits - 1, 0, 5), (bits, times, times)):
        spikes = amax.copy()
        spikes[gap - 1 :: gap] *= 2.0**size
        skipped = simulate(Headroom(format), Stream(spikes, np.ones_like(spikes)), format).overflowed.sum(0)
        assert least <= skipped.max() <= most


@pytest.mark.parametrize(("format", "bits"), [(FP16, 45), (FP8_E5M2, 33)])
def test_gradients_that_are_zero_wherever_zeros_lead_are_never_seen_but_at_a_higher_first_scale(
    format: Format, bits: int
) -> None:
    for size, init_scale, found in ((-bits + 1, 16.0, True), (-bits, 16.0, False), (-bits, 2.0**40, True)):
        run = simulate(Headroom(format, init_scale), flat(60, 2.0**size), format)
        assert (run.state.peak > 0).all() == found
        assert not run.overflowed.any()


def test_before_any_gradient_an_overflow_lowers_the_scale_by_12_bits_down_to_half_of_the_range_and_then_by_4() -> None:
    assert scales(Headroom(init_scale=2.0**60), OVERFLOW, OVERFLOW, *SOON) == [48, 36, 9, 13]
    assert scales(Headroom(init_scale=2.0**30), *[OVERFLOW] * 3) == [20, 16, 12]
    assert scales(Headroom(format=FP8_E5M2, init_scale=2.0**32), OVERFLOW) == [32 - 12]


def test_zeros_before_any_gradient_raise_the_scale_to_half_of_the_range() -> None:
    zero = clean(0.0)
    assert scales(Headroom(init_scale=1), zero, zero, zero) == [16, 20, 20]
    assert scales(Headroom(init_scale=2.0**60), zero, zero) == [16, 20]
    # What vanishes at a scale of 1 does not overflow there.
    assert FP16.smallest_subnormal / 2 * 2**20 < FP16.max
    assert FP8_E5M2.smallest_subnormal / 2 * 2**16 < FP8_E5M2.max


def test_zeros_and_overflows_in_turns_end_at_a_scale_that_fits() -> None:
    zero = clean(0.0)
    assert scales(Headroom(), zero, OVERFLOW, zero, OVERFLOW, zero) == [16, 12, 13, 9, 10]


def test_zeros_after_a_gradient_let_the_peak_leak_and_raise_the_ceiling_as_any_clean_step() -> None:
    policy, zero = Headroom(leak=2**-4), clean(0.0)
    assert after(policy, *SETTLED, zero, clean(1e-45)).peak == (15 / 16) ** 2
    assert_state(after(policy, clean(1.0), zero, zero), scale=2**15, peak=0.25, clean_steps=3, applied=3)
    learned = after(Headroom(leak=0), clean(1.0), OVERFLOW)
    # Soon after an overflow the peak halves.
    zero, half = (after(Headroom(leak=0), clean(amax), start=learned) for amax in (0.0, 0.5))
    assert (zero.scale, zero.peak, zero.ceiling) == (half.scale, half.peak, half.ceiling)


@pytest.mark.parametrize("amax", [math.nan, math.inf])
def test_a_magnitude_that_is_no_magnitude_is_ignored(amax: float) -> None:
    state = after(Headroom(), clean(1.0), clean(amax))
    assert_state(state, scale=2**13, peak=1.0, clean_steps=2, applied=2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"margin_bits": 1.5}, r"`margin_bits` must be a whole number from 0 to 15. Received: margin_bits=1.5"),
        ({"margin_bits": -1}, r"`margin_bits` must be a whole number from 0 to 15. Received: margin_bits=-1"),
        ({"margin_bits": 16}, r"`margin_bits` must be a whole number from 0 to 15. Received: margin_bits=16"),
        ({"margin_bits": math.nan}, r"`margin_bits` must be a whole number from 0 to 15. Received: margin_bits=nan"),
        ({"leak": 0.125}, r"`leak` must be at least 0 and below 0.125. Received: leak=0.125"),
        ({"leak": 0.125 - 1e-12}, r"`leak` must be at least 0 and below 0.125. Received: leak=0.124999999999"),
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
def test_it_finds_the_scale_wherever_it_starts_after_one_overflow_for_each_12_bits_above(exponent: int) -> None:
    run = simulate(Headroom(init_scale=2.0**exponent), flat(60, 2.0**-6))
    above = math.log2(FP16.max) + 6 - exponent
    skips = max(0, math.ceil(-above / 12))
    assert run.overflowed.sum() == skips
    assert not run.overflowed[skips:].any()
    assert (run.bits_low[skips + 4 :] < 5.1).all()


def test_a_rise_of_20_bits_costs_three_steps_and_leaves_nothing_behind() -> None:
    run = simulate(Headroom(), flat(6000, 2.0**-6, 2.0**20))
    assert run.overflowed.sum() == 3
    assert (run.bits_low > 10).sum() <= 1
    assert run.bits_low[-1] < 3.1


def test_a_fall_of_20_bits_is_made_up_for_in_hundreds_of_steps_and_not_in_thousands() -> None:
    run = simulate(Headroom(), flat(6000, 2.0**-6, 2.0**-20))
    assert run.overflowed.sum() == 0
    assert (run.bits_low > 10).sum() < 1000
    assert run.bits_low[-1] < 5.1


def test_tiny_gradients_get_a_scale_above_2_to_the_36_in_two_steps() -> None:
    run = simulate(Headroom(), named("tiny: x 1e-7", 100, 8))
    assert (run.scales[2] >= 2.0**36).all()
    assert not run.overflowed.any()


@pytest.mark.parametrize(("stream", "skips"), [("3 bits hidden", 2), ("8 bits hidden", 5)])
def test_a_lasting_gap_to_gradients_nobody_sees_costs_a_few_steps(stream: str, skips: int) -> None:
    run = simulate(Headroom(), named(stream, 6000, 8, seed=3))
    assert run.overflowed.sum(0).max() <= skips
    assert np.median(run.bits_low) < 5


@pytest.mark.parametrize("stream", ["GAN", "hidden at random", "spikes: 1% x 100", "rare spikes: 0.2% x 1000"])
def test_what_comes_again_and_again_costs_a_few_steps_and_not_one_each_time(stream: str) -> None:
    run = simulate(Headroom(), named(stream, 6000, 8, seed=3))
    assert run.overflowed.sum(0).max() <= 5


def test_a_storm_of_overflows_no_scale_could_prevent_is_made_up_for_in_200_steps() -> None:
    run = simulate(Headroom(), named("storm of 10 overflows", 3000, 4))
    assert (run.overflowed.sum(0) == 10).all()
    assert np.median(run.bits_low[720:]) - np.median(run.bits_low[400:500]) <= 8


SLOW = {
    "steady",
    "tiny: x 1e-7",
    "huge: x 2**24",
    "down 20 bits at once",
    "random walk, 0.1 bit",
    "8 bits hidden",
    "policy gradient",
    "early training: down 10 bits, 2 hidden",
}
"""Of two streams of one kind the one that overflows less."""


@pytest.mark.parametrize("stream", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CHANGES])
def test_on_no_stream_it_skips_more_than_dynamic(stream: str) -> None:
    streams = named(stream, 6000, 16, seed=3)
    skips = [simulate(policy, streams).overflowed.sum() for policy in (Headroom(), Dynamic(min_scale=2.0**-24))]
    assert skips[0] <= skips[1]
