"""The scale that leaves headroom above a leaky peak of the gradients, and below a ceiling that overflows teach."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from gradscale.formats import FP16, Format
from gradscale.policies import checks
from gradscale.policies.arithmetic import Namespace, bounded, larger, pow2_floor, smaller, two_to
from gradscale.policies.contract import ScaleState, Seen, counted, one_more, verdict
from gradscale.record import Array, Record, leaf

LESSON_BITS = 4
"""The unit of caution; an eighth of the format's binades if that is less (2 in E4M3). Activation gradients, which are
not measured, were 3 to 5 bits above those of parameters in a GAN."""

FAST_LEAK = 8
"""How many times faster the peak decays while it is more than two lessons above the gradients: a bit in 43 steps, so
that after a fall by 20 bits it is near in 600, and tasks may take turns every 50, as a bit is less than the margin."""

FRESH = 4
"""Clean steps at the start, or after an overflow, that halve the peak: the first gradient is often an outlier."""

RECOVERY = 2.0**-17
"""Share of `top` by which a clean step raises the ceiling: n clean steps after an overflow it is at least n / 2**17 of
`top`, which is 10 bits below after 200 steps and 5 after 5,000. A power of two: the product is exact."""


@dataclass(frozen=True, slots=True)
class HeadroomState(ScaleState):
    """State of `Headroom`. Its `clean_steps` are those since the last overflow.

    Attributes:
        peak: unscaled gradient that the next step is expected to stay below; 0 while no gradient has been seen.
        ceiling: the highest scale that overflows allow.
    """

    peak: Array = leaf("float32", 0)
    ceiling: Array = leaf("float32", checks.HIGHEST_SCALE)


S = TypeVar("S", bound=HeadroomState)


@dataclass(frozen=True, slots=True, repr=False)
class Headroom(Record):
    """Sets the scale by the largest gradient it remembers, so that it moves before a step overflows.

    The scale is the largest power of two below two bounds:

    - `top` keeps a leaky peak of the unscaled gradients `margin_bits` below the format's maximum (BF16's: below 2**48).
      The peak follows a larger gradient at once, and forgets it slowly.
    - the *ceiling* is for what the peak of parameter gradients cannot foresee: activation gradients and spikes. An
      overflow puts it 12 bits below the scale that failed, or 4 bits fewer than 16 clean steps after the first
      gradient or another overflow; a clean step raises it by 1/131072 of `top`, and doubles it where it is 20 bits
      below `top`.

    The first scale is 16, at which hardly anything overflows. The first gradient sets the next one, 4 bits below `top`.

    Attributes:
        format: the format that the gradients must fit, or its name, such as `"fp16"`.
        init_scale: scale of the first step.
        margin_bits: headroom above the peak, in whole bits from 0 to 15. One more bit means fewer overflows, and a
            scale one binade lower.
        leak: share by which the peak decays at a step: 0.002 is a bit in 350 steps. Decay is 8 times faster while the
            peak is more than 8 bits above the gradients, and the first 3 steps halve it. Gradients that are all zero
            let it decay slowly: what is too small for the format comes back into view.
        recovery: share of `top` by which a clean step raises the ceiling.
        min_scale: the scale never falls below.
        max_scale: the scale never rises above. Tiny gradients need scales of 2**36 and more.

    >>> policy = Headroom()
    >>> state = policy.start()
    >>> for amax in (1e-7, 50.0):
    ...     state = policy.next(state, Seen(amax=np.float32(amax)), np)
    ...     print(f"2**{np.log2(state.scale):.0f}")
    2**33
    2**8
    """

    format: checks.FormatField = checks.FORMAT_FP16
    init_scale: float = 16.0
    margin_bits: float = 2.0
    leak: float = 0.002
    recovery: float = RECOVERY
    min_scale: float = field(default=checks.USELESS_SCALE, kw_only=True)
    max_scale: float = field(default=checks.HIGHEST_SCALE, kw_only=True)

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite", "amax"})
    is_compiled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.check_format(self)
        checks.check_bounds(self)
        checks.check_bits(self, "margin_bits")
        checks.check_share(self, "leak", below=1 / FAST_LEAK)
        checks.check_share(self, "recovery")

    def start(self) -> HeadroomState:
        """Returns the state before the first step."""
        return HeadroomState(scale=np.float32(self.init_scale))

    def next(self, state: HeadroomState, seen: Seen, xp: Namespace) -> HeadroomState:
        """Returns the state after one step, as `follow` says. Does not synchronize with the device."""
        limit = min(self.format.max, checks.HIGHEST_PEAK) / two_to(self.margin_bits, xp)
        return follow(self, limit, self.recovery, state, seen, xp, zeros=state.peak / lesson(self.format) ** 2)

    def predict(self, state: HeadroomState, amax: Array, xp: Namespace) -> dict[str, Array]:
        """Returns the leaky peak after a step whose largest gradient was `amax`."""
        far = state.peak * lesson(self.format) ** -2 > amax
        slow, fast = state.peak * (1.0 - self.leak), state.peak * (1.0 - self.leak * FAST_LEAK)
        left = xp.where(state.clean_steps < FRESH, state.peak * 0.5, xp.where(far, fast, slow))
        return {"peak": larger(amax, left, xp)}


def lesson(format: Format) -> float:
    """Returns the factor by which the rule is cautious: 16, or less in a narrow format."""
    return 2.0 ** max(1, min(LESSON_BITS, format.binades // 8))


def follow(policy: Any, limit: Array, recovery: Array, state: S, seen: Seen, xp: Namespace, zeros: Array = 0.0) -> S:
    """Returns the state after one step of a policy whose `predict` returns a peak, which may reach `limit` scaled.

    A clean step raises the ceiling, by a lesson's share of itself (a sixteenth) at most; it doubles it while that is
    more than half of the format's range below `top`. The scale is the power of two at or below the ceiling and `top`:
    a lesson below `top` if the step is the first clean one since the start or an overflow. An overflow puts ceiling and
    scale three lessons below the scale that failed, so that what comes back fits, but no lower than half of the range
    below `top`; or one lesson, fewer than 16 clean steps after the first gradient or another overflow. While none has
    been seen, half of the range is `top`. Zeros count as `zeros`. A non-finite loss changes nothing but the counters.
    """
    clean, overflow = verdict(seen, xp)
    zero = state.scale * 0  # makes an array of a number: torch has no exact quotient of a number and an array
    amax = zero + seen.amax
    amax = xp.where(amax < checks.SMALLEST_GRADIENT, zeros, amax)
    measured = xp.logical_and(clean, xp.logical_and(amax >= checks.SMALLEST_GRADIENT, amax < np.inf))
    predicted = policy.predict(state, xp.where(measured, amax, 1.0), xp)
    leaves = {name: xp.where(measured, new, getattr(state, name)) for name, new in predicted.items()}
    known = leaves["peak"] > 0
    factor, half = lesson(policy.format), 2.0 ** (min(policy.format.binades, FP16.binades) // 2)
    top = xp.where(known, (zero + limit) / larger(leaves["peak"], limit * checks.LOWEST_SCALE, xp), half)
    low = xp.where(known, top / half, half)
    rise = xp.where(state.ceiling < low, state.ceiling, smaller(top * recovery, state.ceiling / factor, xp))
    ceiling = xp.where(state.ceiling < top, state.ceiling + rise, state.ceiling)
    raised = smaller(ceiling, xp.where(state.clean_steps > 0, top, top / factor), xp)
    again = state.scale / factor
    first = larger(state.scale / factor**3, smaller(low, again, xp), xp)
    learned = xp.where(xp.logical_and(known, state.clean_steps < int(factor)), again, first)
    moved = pow2_floor(xp.where(overflow, learned, raised), xp)
    return counted(
        state,
        clean,
        xp,
        **leaves,
        scale=bounded(xp.where(seen.loss_finite, moved, state.scale), policy.min_scale, policy.max_scale, xp),
        ceiling=xp.where(clean, ceiling, xp.where(overflow, moved, state.ceiling)),
        clean_steps=xp.where(clean, one_more(state.clean_steps, xp), xp.where(overflow, 0, state.clean_steps)),
        stuck=xp.logical_and(overflow, state.scale <= policy.min_scale),
    )
