"""From a predicted peak to a scale: what `Headroom` and `LogMax` share.

A policy predicts the largest unscaled gradient, the peak. The scale is the largest power of two that keeps
`peak * scale` under a limit: the format's maximum less a margin. The peak is measured on parameter gradients of clean
steps, but activation gradients, which are not measured, overflow too, and so do spikes that come once in a thousand
steps. So a second bound is learned: an overflow that the gradients do not explain lowers a ceiling of `level * scale`,
which recovers slowly. The level is a slow minimum of the gradients: it falls when they all fall, so that the scale can
rise, and it does not notice a spike. (Relative to the peak, what a spike taught would be forgotten as soon as the peak
that the next spike leaves has leaked.)

Nothing here rounds differently on another framework. The only sums add 1 to an exact product, so a compiler that fuses
multiplication and addition (XLA does) changes no bit, and powers of two come from `pow2_floor` and `two_to`.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from gradscale.formats import FP16, Format
from gradscale.policies.arithmetic import Namespace, bounded, larger, pow2_floor, smaller, two_to
from gradscale.policies.checks import (
    FORMAT_FP16,
    HIGHEST_SCALE,
    LOWEST_SCALE,
    USELESS_SCALE,
    FormatField,
    check_bounds,
    check_format,
)
from gradscale.policies.contract import ScaleState, Seen, counted, one_more, verdict
from gradscale.record import Array, Record, leaf

HIGHEST_PEAK = 2.0**48
"""Bound of a scaled peak, for formats as wide as BF16: the squares of 2**30 gradients still add up to less than 2**128,
so the norm is finite in float32. Far below, at 2**-126, nothing is lost yet."""

SMALLEST_GRADIENT = 2.0**-126
"""Anything below counts as zero: some devices flush float32 subnormals, and the rule must not depend on the device."""

RECOVERY = 0.0002
"""Share by which a ceiling rises at a clean step: 0.3 bits in 1,000 steps, as 1.0002**1000 = 2**0.289."""

SLOWEST_RECOVERY = 2.0**-5
"""A ceiling that was proved right five times recovers 32 times slower than one never tested; no slower than that."""

LESSON_BITS = 8
"""How many bits below the scale that failed an unexplained overflow keeps the scale. Activation gradients were measured
up to 8 bits above those of parameters, and a batch that is 100 times worse than others is 7 bits above. At half of the
scale that failed, the next of them would mostly overflow again."""

LESSON_SHARE = 5
"""A lesson is at most a fifth of the format's binades: the 8 of FP16's 40, but 6 of E5M2's 32, where each costs more.
With 8 it lost 30 times as much energy in training with bad batches, and skipped as many steps."""

KEPT_BITS = 17
"""How many binades an overflow leaves below the peak, as the next clean step is applied too. Of the small models in
`benchmarks/study`, about 1e-6 of a gradient's energy lies further below its largest. In FP16 that is a fall by half of
its 40 binades, in E5M2 by 12 or 13 of 32."""

EXPLAINED = 0.25
"""If the rule now allows at most this share of the scale that failed, the gradients are the cause of the overflow: with
the margin of two bits, they reach the format's maximum at that scale."""

LEVEL_RISE = 0.002
"""Share by which the level rises at most at a step, when gradients are less than 8 bits above it."""

LEVEL_FALL = 0.25
"""Share by which the level falls at most at a step, so that a single small gradient does not move it far."""

SEARCH_LIMIT = 2.0**48
"""How high the scale rises while all gradients are zero. They may really be zero, and a rise then costs a skip."""


@dataclass(frozen=True, slots=True)
class PeakState(ScaleState):
    """State of a policy that predicts a peak and learns a ceiling.

    Attributes:
        peak: unscaled gradient that the next step is expected to stay below; 0 while no gradient has been seen.
        level: unscaled gradient that most steps stay above; 0 while no gradient has been seen.
        ceiling: what `level * scale` may reach.
        recovery_factor: multiplies the recovery of the ceiling; halves each time an overflow proves the ceiling right.
        failed_scale: scale of the last overflow since a gradient was seen; 0 if there was none.

    Here `clean_steps` are those since the last overflow that a clean step has judged.
    """

    peak: Array = leaf("float32", 0)
    level: Array = leaf("float32", 0)
    ceiling: Array = leaf("float32", FP16.max)
    recovery_factor: Array = leaf("float32", 1)
    failed_scale: Array = leaf("float32", 0)


T = TypeVar("T", bound=PeakState)


@dataclass(frozen=True, slots=True, repr=False)
class PeakPolicy(Record):
    """The settings that every policy with a predicted peak has.

    Attributes:
        format: the format that the gradients must fit, or its name, such as `"fp16"`.
        init_scale: scale of the first step.
        min_scale: the scale never falls below.
        max_scale: the scale never rises above.
    """

    format: FormatField = FORMAT_FP16
    init_scale: float = 2.0**16
    min_scale: float = field(default=USELESS_SCALE, kw_only=True)
    max_scale: float = field(default=HIGHEST_SCALE, kw_only=True)

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite", "amax"})

    def __post_init__(self) -> None:
        check_format(self)
        check_bounds(self)


class PeakSettings(NamedTuple):
    """What determines the scale for a peak.

    Attributes:
        policy: the policy, for its format and its bounds.
        limit: what the scaled peak may reach; where the ceiling starts, and never rises above.
        recovery: share by which the ceiling rises at a clean step, while `recovery_factor` is 1.
        rise_bits: how many bits higher the target must be for the scale to rise.
    """

    policy: PeakPolicy
    limit: Array
    recovery: Array = RECOVERY
    rise_bits: Array = 0.0


class Observation(NamedTuple):
    """What a step says about the size of the gradients. Its magnitudes are positive, finite and normal float32 numbers.

    Attributes:
        clean: the step was clean.
        overflow: the step overflowed.
        measured: the step was clean and had a gradient that is not zero.
        all_zero: the step was clean and all its gradients were zero.
        amax: the largest gradient; 1 where nothing was measured.
        previous_peak: the peak before the step, or `amax` if there was none.
        level: the level after the step.
    """

    clean: Array
    overflow: Array
    measured: Array
    all_zero: Array
    amax: Array
    previous_peak: Array
    level: Array


def search_factor(format: Format) -> float:
    """Returns the factor by which the scale changes while no gradient is seen, and falls at an overflow.

    It is half the format's range, in bits: 20 in FP16. What was too large by a little is then still far from zero.
    """
    # Bounded for wide formats such as BF16, where half of the range would reach the bounds of the scale itself.
    return 2.0 ** min(20, format.binades // 2)


def lesson(format: Format) -> float:
    """Returns the factor between a scale that failed without a known cause and the one that is kept from then on."""
    return 2.0 ** -min(LESSON_BITS, format.binades // LESSON_SHARE)


def highest_peak(format: Format, like: Array) -> Array:
    """Returns the largest value that a scaled peak may have in the format, in the type of `like`."""
    return like * 0 + min(format.max, HIGHEST_PEAK)


def first_state(kind: type[T], policy: PeakPolicy, limit: Array) -> T:
    """Returns the state of class `kind` before the first step of `policy`, whose ceiling is `limit`."""
    return kind(
        scale=np.float32(policy.init_scale),
        ceiling=np.float32(limit),
    )


def observe(state: PeakState, seen: Seen, xp: Namespace) -> Observation:
    """Returns what the step says about the size of the gradients, whatever `seen` holds."""
    clean, overflow = verdict(seen, xp)
    amax = state.scale * 0 + seen.amax  # an array of the framework, also where `seen` has numpy's default
    measured = xp.logical_and(clean, xp.logical_and(xp.isfinite(amax), amax >= SMALLEST_GRADIENT))
    all_zero = xp.logical_and(clean, amax < SMALLEST_GRADIENT)
    amax = xp.where(measured, amax, 1.0)
    peak = xp.where(state.peak > 0, state.peak, amax)
    level = _level(xp.where(state.level > 0, state.level, amax), amax, xp)
    return Observation(clean, overflow, measured, all_zero, amax, peak, level)


def _level(level: Array, amax: Array, xp: Namespace) -> Array:
    """Returns the level after a step: it follows `amax`, slowly upwards, and at most by a quarter downwards."""
    # A slow minimum, not a mean: spikes, and the larger of two networks that take turns, must not move it.
    # The inner `smaller` keeps the product finite.
    highest = smaller(level, HIGHEST_SCALE, xp) * (LEVEL_RISE * decay_speed(amax, level, xp) + 1.0)
    return bounded(amax, level * (1.0 - LEVEL_FALL), highest, xp)


def next_state(
    state: T, observed: Observation, peak: Array, settings: PeakSettings, xp: Namespace, **changes: Array
) -> T:
    """Returns the state after one step: `observed` is what `observe` returned, `changes` are further leaves.

    `peak` is ignored where nothing was measured.
    """
    measured, overflow = observed.measured, observed.overflow
    ceiling, recovery_factor = _learned(state, observed, settings, xp)
    ceiling = _recovered(ceiling, recovery_factor, settings, xp)
    target = smaller(_scale_for(settings.limit, peak, xp), _scale_for(ceiling, observed.level, xp), xp)
    unmeasured = xp.where(overflow, _lowered(state, settings, xp), _searched(state, observed, settings, xp))
    scale = xp.where(measured, _moved(state, target, settings, xp), unmeasured)
    return counted(
        state,
        observed.clean,
        xp,
        clean_steps=xp.where(measured, _clean_steps(state, xp), state.clean_steps),
        scale=bounded(scale, settings.policy.min_scale, settings.policy.max_scale, xp),
        stuck=xp.logical_and(overflow, state.scale <= settings.policy.min_scale),
        peak=xp.where(measured, peak, state.peak),
        level=xp.where(measured, observed.level, state.level),
        ceiling=xp.where(measured, ceiling, state.ceiling),
        recovery_factor=xp.where(measured, recovery_factor, state.recovery_factor),
        failed_scale=xp.where(measured, 0.0, xp.where(overflow, state.scale, state.failed_scale)),
        **changes,
    )


def _clean_steps(state: PeakState, xp: Namespace) -> Array:
    """Returns the clean steps since the last overflow, with one more."""
    return xp.where(state.failed_scale > 0, 1, one_more(state.clean_steps, xp))


def _learned(state: PeakState, observed: Observation, settings: PeakSettings, xp: Namespace) -> tuple[Array, Array]:
    """Returns the ceiling and its recovery factor once a clean step shows what caused the overflows before it, if any.

    Where the gradients have grown so much that the rule itself forbids that scale, they are the cause (`EXPLAINED`).
    Otherwise it is an unmeasured gradient or a spike: the ceiling falls a `lesson` below the scale that failed, and
    will recover more slowly. Where that scale was already far below what the rule allows, no scale could have
    prevented the overflow, and nothing is learned; unless it follows at once on the overflow before, which shows that
    the rule allows too much.
    """
    # Judged at the first clean step, not at the overflow: only then is it known how large the gradients were.
    top = larger(observed.amax, observed.previous_peak, xp)
    allowed = smaller(_scale_for(settings.limit, top, xp), _scale_for(state.ceiling, observed.level, xp), xp)
    farthest, learned = search_factor(settings.policy.format), lesson(settings.policy.format)
    failed = larger(state.failed_scale, LOWEST_SCALE, xp)
    plausible, again = failed > allowed / farthest, state.clean_steps == 1
    unexplained = xp.logical_and(state.failed_scale > 0, failed * EXPLAINED < allowed)
    learns = xp.logical_and(unexplained, xp.logical_or(plausible, again))
    lowered = observed.level * larger(
        xp.where(plausible, smaller(failed, allowed, xp), allowed) * learned, LOWEST_SCALE, xp
    )
    # Batches that overflow at any scale, now and then, must not drive the gradients out of the format: what two
    # lessons did not prevent, a third would not either. The first may start far below what the rule allows.
    bound = xp.where(state.ceiling < settings.limit, settings.limit * learned**2, settings.limit / farthest)
    lowest = xp.where(again, settings.policy.format.smallest_subnormal, bound)
    ceiling = xp.where(learns, smaller(larger(lowered, lowest, xp), state.ceiling, xp), state.ceiling)
    slower = larger(state.recovery_factor * 0.5, SLOWEST_RECOVERY, xp)
    return ceiling, xp.where(learns, slower, state.recovery_factor)


def _recovered(ceiling: Array, recovery_factor: Array, settings: PeakSettings, xp: Namespace) -> Array:
    """Returns the ceiling after it rose for one step."""
    # The factor is a power of two, so the product is exact, and fusing it with the sum changes no bit.
    return smaller(ceiling * (settings.recovery * recovery_factor + 1.0), settings.limit, xp)


def _moved(state: PeakState, target: Array, settings: PeakSettings, xp: Namespace) -> Array:
    """Returns the power of two that the target allows, or the scale as it was if that is only a little higher.

    At the first gradient, and after an overflow, no gradient has chosen the scale: it goes to its target in any case.
    """
    highest = pow2_floor(target, xp)
    worth_it = highest / two_to(settings.rise_bits, target, xp) >= state.scale
    chosen = xp.logical_and(state.peak > 0, state.failed_scale <= 0)
    rises = xp.logical_or(worth_it, xp.logical_not(chosen))
    return xp.where(rises, highest, smaller(state.scale, highest, xp))


def _lowered(state: PeakState, settings: PeakSettings, xp: Namespace) -> Array:
    """Returns the scale after an overflow: far lower, since the next clean step shows how high it can be.

    The first of a series leaves the peak `KEPT_BITS`. Further ones fall as far, to where the peak is not yet subnormal,
    and then halve: overflows that no scale prevents must not end at a scale with which nothing can be measured.
    """
    format = settings.policy.format
    peak = larger(state.peak, SMALLEST_GRADIENT, xp)
    useful = _scale_for(format.smallest_subnormal * 2.0**KEPT_BITS, peak, xp)
    visible = xp.where(state.failed_scale > 0, format.smallest_normal / peak, useful)
    lowest = xp.where(state.peak > 0, smaller(pow2_floor(visible, xp), state.scale * 0.5, xp), 0.0)
    return larger(state.scale / search_factor(format), lowest, xp)


def _searched(state: PeakState, observed: Observation, settings: PeakSettings, xp: Namespace) -> Array:
    """Returns a higher scale where all gradients were zero and the scale may be the cause; else the scale as it was.

    It may be the cause if no gradient has ever been seen, or if even the peak would be subnormal.
    """
    low = state.scale < settings.policy.format.smallest_normal / larger(state.peak, SMALLEST_GRADIENT, xp)
    factor = search_factor(settings.policy.format)
    # After an overflow it rises by half as many bits, and first to what is left below the scale that failed: else it
    # would go back and forth between zeros and overflow.
    half = 2.0 ** (math.frexp(factor)[1] // 2)
    start = smaller(state.scale, SEARCH_LIMIT / factor, xp)
    below = xp.where(state.scale * 2.0 < state.failed_scale, state.failed_scale * 0.5, SEARCH_LIMIT)
    higher = xp.where(state.failed_scale > 0, smaller(start * half, below, xp), start * factor)
    # The `larger` keeps a scale that is above the limit already: a search must not lower it.
    higher = larger(higher, state.scale, xp)
    return xp.where(xp.logical_and(observed.all_zero, low), higher, state.scale)


def _scale_for(ceiling: Array, peak: Array, xp: Namespace) -> Array:
    """Returns the scale that brings `peak` to `ceiling`, or the highest of all scales if that is lower."""
    # The bound is on the divisor, as the quotient itself could overflow.
    return ceiling / larger(peak, ceiling * LOWEST_SCALE, xp)


def decay_speed(high: Array, low: Array, xp: Namespace) -> Array:
    """Returns how many times faster `high` falls towards `low`: 1 up to 8 bits above it, then 4, 16 and 64.

    In steps, because a logarithm does not have the same bits on every framework.
    """
    speed = high * 0 + 1.0
    for bits in (8, 10, 14):
        speed = xp.where(high * 2.0**-bits > low, speed * 4.0, speed)
    return speed
