"""Whatever bad batches come, the scale of `Headroom` is soon near what the gradients allow again."""

import math
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import FP8_E5M2, FP16, Format, Headroom, Seen, replay
from gradscale.policies.contract import advanced
from gradscale.policies.scalars import SCALARS

SOON, SOON_BITS = 200, 12
LATER, LATER_BITS = 5000, 6
"""So many clean steps after the last step that was not finite, the scale is at most so many bits, and the margin, below
what the gradients allow."""

BAD, ZERO, GOOD = "bad", "zero", "good"


def at_random(share: float, replaced: str, steps: Iterable[str], seed: int) -> list[str]:
    """Returns the steps with a share of the good ones replaced."""
    rng = random.Random(seed)
    return [replaced if step is GOOD and rng.random() < share else step for step in steps]


gaps = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 100)), min_size=1, max_size=40).map(
    lambda pairs: [step for burst, gap in pairs for step in (BAD,) * burst + (GOOD,) * gap]
)
"""Bursts of bad steps with 1 to 100 clean steps between them."""

pairs = st.integers(1, 60).map(lambda count: [BAD, GOOD] * count)
"""Every second step is bad."""

shares = st.tuples(st.floats(0.001, 0.05), st.integers(0, 999)).map(
    lambda drawn: at_random(drawn[0], BAD, [GOOD] * 1500, drawn[1])
)
"""From 0.1% to 5% of the steps are bad, at random."""


@st.composite
def patterns(draw: st.DrawFn) -> list[str]:
    """Draws what each step is, after some clean ones: bad at any scale, all zero, or good; the last one is bad."""
    steps = draw(gaps | pairs | shares)
    masked = at_random(draw(st.sampled_from([0.0, 0.0, 0.1, 0.4])), ZERO, steps, draw(st.integers(0, 999)))
    return [GOOD] * draw(st.sampled_from([1, 100])) + masked + [BAD]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[list[float], int]:
    """Draws the sizes of the gradients, in bits, and how many steps each lasts: mostly one size for all."""
    largest = draw(st.integers(-20, 6))
    smaller = draw(st.sampled_from([[], [], [0.5], [6.0], [20.0], [2.0, 9.0]]))
    return [largest, *(largest - bits for bits in smaller)], draw(st.integers(1, 60))


def bits_low(policy: Any, format: Format, pattern: Iterable[str], sizes: tuple[list[float], int]) -> dict[int, float]:
    """Returns how many bits the scale is below what the largest gradient allows, so many steps after the pattern."""
    exponents, period = sizes
    allowed = math.log2(format.max) - max(exponents)
    steps = [*pattern, *[GOOD] * LATER]
    state, found = policy.start(), {}
    for index, step in enumerate(steps):
        amax = 0.0 if step is ZERO else 2.0 ** exponents[index // period % len(exponents)]
        amax = amax if amax * state.scale > format.smallest_subnormal / 2 else 0.0  # what is left of it in the format
        finite = step is not BAD and amax * state.scale <= format.max
        state = advanced(
            policy, state, Seen(finite=np.bool_(finite), amax=np.float32(amax if finite else np.inf)), SCALARS
        )
        found[index + 1 - (len(steps) - LATER)] = allowed - math.log2(state.scale)
    return found


@pytest.mark.parametrize("format", [FP16, FP8_E5M2])
@given(pattern=patterns(), sizes=sizes())
@settings(max_examples=40, deadline=None)
def test_no_pattern_of_bad_steps_keeps_the_scale_low(
    format: Format, pattern: list[str], sizes: tuple[list[float], int]
) -> None:
    check_recovery(format, pattern, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("format", [FP16, FP8_E5M2])
@given(pattern=patterns(), sizes=sizes())
@settings(max_examples=100, deadline=None)
def test_none_of_many_patterns_of_bad_steps_keeps_the_scale_low(
    format: Format, pattern: list[str], sizes: tuple[list[float], int]
) -> None:
    check_recovery(format, pattern, sizes)


def check_recovery(format: Format, pattern: list[str], sizes: tuple[list[float], int]) -> None:
    policy = Headroom(format)
    low = bits_low(policy, format, pattern, sizes)
    assert max(low[step] for step in range(SOON, LATER)) <= SOON_BITS + policy.margin_bits
    assert low[LATER] <= LATER_BITS + policy.margin_bits


@pytest.mark.parametrize("share", [0.001, 0.002, 0.005, 0.01, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_at_any_share_of_bad_batches_the_scale_is_rarely_very_low(share: float, seed: int) -> None:
    low = bits_low(Headroom(), FP16, at_random(share, BAD, [GOOD] * 10_000, seed), ([-6.0], 1))
    assert np.mean([bits > 23 for step, bits in low.items() if step <= 0]) < 0.1


def test_three_nan_batches_close_together_are_forgotten() -> None:
    amax = np.full(2000, 0.05)
    amax[[100, 102, 104]] = np.nan
    scales = replay(Headroom(), amax=amax).scales
    assert math.log2(scales[99]) == 18
    assert math.log2(scales[105]) == -1
    assert math.log2(scales[-1]) == 12


def test_one_overflow_after_a_calm_costs_12_bits_and_each_of_8_is_back_when_a_pencil_says_so() -> None:
    amax = np.full(8000, 0.05)
    amax[100] = np.nan
    bits = np.log2(replay(Headroom(), amax=amax).scales)
    assert (bits[99], bits[100], bits[101]) == (18, 6, 6)
    share = FP16.max / 4 / 0.05 / 2**17
    back = [100 + math.ceil((2**exponent - 2**6) / share) for exponent in range(7, 15)]
    assert [step - 100 for step in back] == [26, 77, 180, 385, 794, 1614, 3253, 6532]
    # The ceiling is rounded at every step, and is a few steps early or late.
    assert [bits[step - 10] for step in back] == list(range(6, 14))
    assert [bits[step + 10] for step in back] == list(range(7, 15))


@pytest.mark.parametrize("format", [FP16, FP8_E5M2])
@pytest.mark.parametrize("bits", [10, 20, 26, 34])
@pytest.mark.parametrize("period", [1, 2, 5, 50])
def test_two_tasks_far_apart_skip_a_few_steps_whichever_is_first(format: Format, bits: int, period: int) -> None:
    large = 7.0
    for sizes in ([large - bits, large], [large, large - bits]):
        scales, state, skipped = [], (policy := Headroom(format)).start(), 0
        for step in range(2000):
            amax = 2.0 ** sizes[step // period % 2]
            finite = amax * state.scale <= format.max
            amax = amax if amax * state.scale > format.smallest_subnormal / 2 else 0.0
            seen = Seen(finite=np.bool_(finite), amax=np.float32(amax if finite else np.inf))
            state = advanced(policy, state, seen, SCALARS)
            skipped += not finite
            scales.append(state.scale)
        assert skipped <= (bits / 3 if sizes[0] < large else 0)
        assert math.log2(format.max) - large - math.log2(scales[-1]) <= LATER_BITS + policy.margin_bits


@pytest.mark.parametrize("fall", [20, 38, 44])
def test_gradients_that_fall_below_the_smallest_number_come_back_into_view(fall: int) -> None:
    policy, zeros = Headroom(), 0
    state = policy.start()
    for step in range(8000):
        amax = 1.0 if step < 20 else 2.0**-fall
        amax = amax if amax * state.scale > FP16.smallest_subnormal / 2 else 0.0
        state = advanced(policy, state, Seen(amax=np.float32(amax)), SCALARS)
        zeros += amax == 0
    assert zeros <= 350 * max(0, fall - 36)
    assert math.log2(FP16.max) + fall - math.log2(state.scale) <= LATER_BITS + policy.margin_bits


@pytest.mark.parametrize("format", [FP16, FP8_E5M2])
@pytest.mark.parametrize("fall", [0, 14, 20])
@pytest.mark.parametrize("overflows", [2, 7, 21, 60])
def test_no_series_of_overflows_ends_where_every_gradient_is_zero(format: Format, fall: int, overflows: int) -> None:
    # With a peak from before a fall of the gradients, the scale may drop so low that none of them is seen.
    policy = Headroom(format)
    state = policy.start()
    for step in [0] * 20 + [-fall] * 20 + [None] * overflows + [-fall] * 200:
        amax = 0.0 if step is None else 2.0**step
        seen = 0.0 if amax * state.scale <= format.smallest_subnormal / 2 else amax
        finite = step is not None and amax * state.scale <= format.max
        state = advanced(policy, state, Seen(finite=np.bool_(finite), amax=np.float32(seen)), SCALARS)
    assert state.scale * 2.0**-fall >= format.smallest_subnormal
