"""From a predicted peak to a scale: what `Headroom` and `LogMax` share.

A policy predicts the largest gradient, the peak, and the scale is the largest power of two that keeps `peak * scale`
under a ceiling. The peak is measured on parameter gradients, but the gradients of activations overflow too and nobody
looks at them. So the ceiling is learnt: it starts at the format's maximum less a margin, an overflow that the peak
cannot explain lowers it to half of what overflowed, and it rises again slowly.

Nothing here rounds differently on another framework. The only sums add 1 to an exact product, so a compiler that fuses
multiplication with addition (XLA does) changes no bit, and powers of two come from `pow2_floor` and `two_to`.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from gradscale.formats import FP16, Format
from gradscale.policies.arithmetic import Namespace, bounded, larger, pow2_floor, smaller
from gradscale.policies.checks import LOWEST_SCALE
from gradscale.policies.contract import ScaleState, Seen, counted, verdict
from gradscale.record import Array, leaf

HIGHEST_PEAK = 2.0**48
"""How high a scaled peak may go, in formats as wide as BF16 too: gradients of any number can still be squared and added
up in float32. Far below, at 2**-126, nothing is lost yet."""

SMALLEST_GRADIENT = 2.0**-126
"""Anything below counts as zero: some devices flush float32 subnormals, and the rule must not depend on the device."""

FIRST_DROP = 0.5
"""The first overflow after a clean step halves the scale. Each further one squares the drop: 1, 2, 4, 8, 16 bits."""

SLOWEST = 2.0**-5
"""A ceiling that was proved right five times rises 32 times slower than one never tested; no slower than that."""

PLAUSIBLE_GAP = 2.0**-8
"""How far below its limit a ceiling is believed. Activation gradients were seen up to 8 bits above the parameters'; a
ceiling further down is the work of overflows that no scale could have prevented."""

HURRY = 2.0**5
"""How many times faster a ceiling rises that is not believed."""

RECOVERY = 0.00035
CLIMB_BITS = 4.0
"""How fast a ceiling rises again (a share per step: half a bit in 1,000) and how far below its aim a jump up stops."""

DARK_LIMIT = 2.0**48
"""How high the scale climbs while every gradient is zero. They may truly be zero, and then each step up is a skip."""


@dataclass(frozen=True, slots=True)
class SteeredState(ScaleState):
    """State of a policy that predicts a peak and learns a ceiling.

    Attributes:
        peak: gradient that the next step is expected to stay below, in true units; 0 before the first was seen.
        ceiling: what `peak * scale` may reach.
        calm: slows the rise of the ceiling down; halves each time that an overflow proves the ceiling right.
        failed: scale of the last overflow since a gradient was seen; 0 if there was none.
        drop: what the next overflow multiplies the scale by.
    """

    peak: Array = leaf("float32", 0)
    ceiling: Array = leaf("float32", FP16.max)
    calm: Array = leaf("float32", 1)
    failed: Array = leaf("float32", 0)
    drop: Array = leaf("float32", FIRST_DROP)


T = TypeVar("T", bound=SteeredState)


class Helm(NamedTuple):
    """The settings that steer a scale.

    Attributes:
        format: the format that the gradients must fit.
        limit: where the ceiling starts, and never rises above.
        recovery: share by which the ceiling rises at a clean step, while `calm` is 1.
        climb_bits: how far below its aim the scale stops when it jumps up; from there it doubles.
        min_scale: the scale never falls below.
        max_scale: the scale never rises above.
    """

    format: Format
    limit: Array
    recovery: Array
    climb_bits: Array
    min_scale: Array
    max_scale: Array


class Sighting(NamedTuple):
    """What a step told about the size of the gradients.

    Attributes:
        told: the step was clean and had a gradient.
        zero: the step was clean and had none.
        amax: the largest gradient; a harmless number where there was none.
        expected: the peak before the step, or `amax` if there was none.
    """

    told: Array
    zero: Array
    amax: Array
    expected: Array


def stride(format: Format) -> float:
    """Returns how far the scale moves in the dark: at most half of the format's binades, so that it misses none."""
    return 2.0 ** min(16, format.binades // 2)


def highest(format: Format, like: Array) -> Array:
    """Returns the largest value of the format, in the type of `like`, with room for a sum of squares in float32."""
    return like * 0 + min(format.max, HIGHEST_PEAK)


def sighting(state: SteeredState, seen: Seen, xp: Namespace) -> Sighting:
    """Returns what the step told. Its magnitudes are positive, finite and normal, whatever `seen` holds."""
    clean, _ = verdict(seen, xp)
    amax = state.scale * 0 + seen.amax  # an array of the framework, also where `seen` has numpy's default
    told = xp.logical_and(clean, xp.logical_and(xp.isfinite(amax), amax >= SMALLEST_GRADIENT))
    zero = xp.logical_and(clean, amax < SMALLEST_GRADIENT)
    amax = xp.where(told, amax, 1.0)
    return Sighting(told, zero, amax, xp.where(state.peak > 0, state.peak, amax))


def steered(state: T, seen: Seen, sight: Sighting, peak: Array, helm: Helm, xp: Namespace, **changes: Array) -> T:
    """Returns the state after one step.

    Args:
        state: the state before the step.
        seen: what the gradients looked like.
        sight: what `sighting` made of that.
        peak: the peak predicted from it; ignored where the sighting told nothing.
        helm: the settings.
        xp: the framework's array module.
        **changes: further leaves of the next state.
    """
    told = sight.told
    clean, overflow = verdict(seen, xp)
    ceiling, calm = _judged(state, sight, helm, xp)
    ceiling = _risen(ceiling, calm, helm, xp)
    unseen = xp.where(overflow, state.scale * state.drop, _in_the_dark(state, sight, helm, xp))
    scale = xp.where(told, _aimed(state.scale, ceiling, peak, helm, xp), unseen)
    deeper = larger(state.drop * state.drop, 1 / stride(helm.format), xp)
    return counted(
        state,
        clean,
        xp,
        scale=bounded(scale, helm.min_scale, helm.max_scale, xp),
        stuck=xp.logical_and(overflow, state.scale <= helm.min_scale),
        peak=xp.where(told, peak, state.peak),
        ceiling=xp.where(told, ceiling, state.ceiling),
        calm=xp.where(told, calm, state.calm),
        failed=xp.where(told, 0.0, xp.where(overflow, state.scale, state.failed)),
        drop=xp.where(told, FIRST_DROP, xp.where(overflow, deeper, state.drop)),
        **changes,
    )


def _judged(state: SteeredState, sight: Sighting, helm: Helm, xp: Namespace) -> tuple[Array, Array]:
    """Returns the ceiling and the calm once a clean step shows what the overflows before it, if any, came from.

    Where the gradients have grown so much that the ceiling itself forbids half of the scale that failed, that explains
    it. Else gradients that nobody sees are to blame: the ceiling comes down to that half, and will rise more slowly.
    It never comes down so far that the peak itself would be subnormal.
    """
    top = larger(sight.amax, sight.expected, xp)
    allowed = _fitting(state.ceiling, top, xp)
    half = larger(state.failed * 0.5, LOWEST_SCALE, xp)
    blamed = xp.logical_and(state.failed > 0, half < allowed)
    ceiling = xp.where(blamed, top * smaller(half, allowed, xp), state.ceiling)
    calm = xp.where(blamed, larger(state.calm * 0.5, SLOWEST, xp), state.calm)
    return larger(ceiling, helm.format.smallest_normal, xp), calm


def _risen(ceiling: Array, calm: Array, helm: Helm, xp: Namespace) -> Array:
    """Returns the ceiling after it rose for one step."""
    pace = xp.where(ceiling < helm.limit * PLAUSIBLE_GAP, HURRY, calm)
    return smaller(ceiling * (helm.recovery * pace + 1.0), helm.limit, xp)


def _aimed(scale: Array, ceiling: Array, peak: Array, helm: Helm, xp: Namespace) -> Array:
    """Returns the power of two that the peak allows, or one on the way there if that is far up.

    Near the top the scale goes up by doubling, so that hidden gradients cost one overflow and not a run of them.
    """
    aim = _fitting(ceiling, peak, xp)
    reach = larger(scale * 2.0, aim / two_to(helm.climb_bits, aim, xp), xp)
    return pow2_floor(smaller(aim, reach, xp), xp)


def _in_the_dark(state: SteeredState, sight: Sighting, helm: Helm, xp: Namespace) -> Array:
    """Returns a higher scale where all gradients were zero and the scale may be why; else the scale as it was.

    It may be why if no gradient was ever seen, or if even the peak would be subnormal.
    """
    low = state.scale < helm.format.smallest_normal / larger(state.peak, SMALLEST_GRADIENT, xp)
    step = stride(helm.format)
    higher = larger(smaller(state.scale, DARK_LIMIT / step, xp) * step, state.scale, xp)
    return xp.where(xp.logical_and(sight.zero, low), higher, state.scale)


def _fitting(ceiling: Array, peak: Array, xp: Namespace) -> Array:
    """Returns the scale that brings `peak` to `ceiling`, or the highest of all scales if that is lower."""
    return ceiling / larger(peak, ceiling * LOWEST_SCALE, xp)


def haste(high: Array, low: Array, xp: Namespace) -> Array:
    """Returns how many times faster `high` shall fall towards `low`: 1 up to 8 bits above, 4, 16 and 64 further up.

    A staircase, because a logarithm does not have the same bits everywhere.
    """
    pace = high * 0 + 1.0
    for bits in (8, 10, 14):
        pace = xp.where(high * 2.0**-bits > low, pace * 4.0, pace)
    return pace


def two_to(bits: Array, like: Array, xp: Namespace) -> Array:
    """Returns 2**bits, exactly, for whole `bits` from 0 to 15, in the type of `like`.

    A power may be off in its last digits; here it is a small integer, and rounding brings it back.

    >>> import numpy as np
    >>> float(two_to(2.0, np.float32(1), np))
    4.0
    """
    return xp.floor(2.0 ** (like * 0 + bits) + 0.5)
