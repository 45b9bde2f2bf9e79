"""The scale that leaves headroom above a leaky peak of the gradients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscale.policies.arithmetic import Namespace, larger, two_to
from gradscale.policies.checks import check_bits, check_share
from gradscale.policies.contract import Seen
from gradscale.policies.peak import (
    RECOVERY,
    PeakPolicy,
    PeakSettings,
    PeakState,
    decay_speed,
    first_state,
    highest_peak,
    next_state,
    observe,
)
from gradscale.record import Array

RISE_BITS = 3.0
"""The scale rises once its target is this many bits higher. Two bits more would gain FP16 nothing, and each rise is a
risk, as unmeasured gradients show themselves only in an overflow."""


@dataclass(frozen=True, slots=True)
class HeadroomState(PeakState):
    """State of `Headroom`. Its `peak` is the leaky maximum of the gradients."""


@dataclass(frozen=True, slots=True, repr=False)
class Headroom(PeakPolicy):
    """Sets the scale by the largest gradient it remembers, so that it moves before a step overflows.

    It keeps a leaky peak of the unscaled gradients, and the scale is the largest power of two with which that peak
    stays `margin_bits` below the format's maximum, or below 2**48 in formats as wide as BF16. It follows the gradients
    in both directions: one step is enough to find the scale, wherever it starts, and when the gradients fall it rises
    within hundreds of steps.

    Only parameter gradients of clean steps are measured, while activation gradients may overflow first, and a spike may
    come without warning. So an overflow that the gradients do not explain keeps the scale lower from then on, by 8 bits
    in FP16 and 6 in FP8 E5M2. That bound recovers slowly, and more slowly each time an overflow proves it right, so
    that overflows do not recur.

    Scales are bit-exact on every framework.

    Attributes:
        format: the format that the gradients must fit, or its name, such as `"fp16"`.
        init_scale: scale of the first step.
        margin_bits: headroom above the peak, in whole bits from 0 to 15. One more bit means fewer overflows, and a
            scale one binade lower.
        leak: share by which the peak decays at a step. 0.002 is a bit in 350 steps. Decay is 4, 16 and 64 times
            faster once the peak is more than 8, 10 and 14 bits above the gradients.
        recovery: share by which a bound that an overflow lowered rises at a clean step.
        rise_bits: the scale rises only where its target is at least this many whole bits (0 to 15) higher. A bit or two
            more would gain little, and unmeasured gradients may overflow.
        min_scale: the scale never falls below.
        max_scale: the scale never rises above. Tiny gradients need scales of 2**36 and more.

    >>> policy = Headroom(margin_bits=2)
    >>> state = policy.start()
    >>> for amax in (1e-7, 1e-7, 1e-7, 50.0):
    ...     state = policy.next(state, Seen(amax=np.float32(amax)), np)
    ...     print(f"2**{np.log2(state.scale):.0f}")
    2**37
    2**37
    2**37
    2**8
    """

    margin_bits: float = 2.0
    leak: float = 0.002
    recovery: float = RECOVERY
    rise_bits: float = RISE_BITS

    is_compiled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        PeakPolicy.__post_init__(self)  # `super()` finds no class where `slots=True` made a new one
        check_bits(self, "margin_bits", "rise_bits")
        check_share(self, "leak", "recovery")

    def start(self) -> HeadroomState:
        """Returns the state before the first step."""
        return first_state(HeadroomState, self, self._limit(np.float32(self.init_scale), np))

    def next(self, state: HeadroomState, seen: Seen, xp: Namespace) -> HeadroomState:
        """Returns the state after one step.

        A clean step updates the peak and moves the scale to it. An overflow lowers the scale by half of the format's
        range, 20 bits in FP16, until the next clean step shows what it can be; by less where the peak would keep fewer
        than 17 binades, and a further overflow only halves it where the peak would be subnormal. A step whose gradients
        are all zero changes nothing, unless the scale may be the cause: then it rises by half of the range. A
        non-finite loss changes nothing but the counters. Does not synchronize with the device.
        """
        observed = observe(state, seen, xp)
        # Up to 64 times the leak may exceed 1; the peak must not become negative.
        kept = larger(1.0 - self.leak * decay_speed(observed.previous_peak, observed.amax, xp), 0.0, xp)
        peak = larger(observed.amax, observed.previous_peak * kept, xp)
        limit = self._limit(state.scale, xp)
        settings = PeakSettings(self, limit, self.recovery, self.rise_bits)
        return next_state(state, observed, peak, settings, xp)

    def _limit(self, like: Array, xp: Namespace) -> Array:
        """Returns the largest value that a scaled peak may have with the margin, in the type of `like`."""
        return highest_peak(self.format, like) / two_to(self.margin_bits, like, xp)
