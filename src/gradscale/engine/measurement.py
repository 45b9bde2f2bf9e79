"""Measure: what one read of the gradients found, and the only place where that becomes a `Seen`."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gradscale.formats import FP16
from gradscale.policies.arithmetic import Namespace, smaller
from gradscale.policies.contract import Seen
from gradscale.record import Array

LARGEST_NORM = 2.0**64
"""Where a scaled norm becomes inf: its square is the first number that does not fit float32, in which most adapters sum
squares. The others do as if they did."""


UNREAD = Seen()
"""What is seen of a step in which nothing was read."""


class Measurement(NamedTuple):
    """What one read of the gradients found, before they are unscaled.

    Attributes:
        sizes: one number per gradient, such as its norm or its largest magnitude; inf or NaN where the gradient holds
            one. None, or empty, where only the flag in `total` is known.
        total: one number for all gradients, which is not finite if one of them is not.
        amax: largest magnitude of any gradient; None where it was not read.
        norm: Euclidean norm over all gradients; None where it was not read.
        upper_share: share of gradient elements above the edge that a policy watches; None where it was not counted.
        half_amax: largest magnitude of the gradients that are unscaled in FP16, where they may overflow; None where
            there are none.
        single_total: `total` of the gradients that are unscaled in float32; None where they all are, and `total` is a
            float32 itself.
    """

    sizes: Array | None
    total: Array
    amax: Array | None = None
    norm: Array | None = None
    upper_share: Array | None = None
    half_amax: Array | None = None
    single_total: Array | None = None

    def finite(self, divisor: Array, xp: Namespace) -> Array:
        """Returns whether every gradient is finite, before and after it is divided by `divisor`.

        A norm that was asked for and is not finite counts as an overflow.
        """
        # The reciprocal, as in the update: that of a subnormal divisor may be inf where a quotient is not.
        unscale = 1.0 / divisor
        # A scale below 1 makes gradients larger. In float32 that shows in `total`, in FP16 only in `half_amax`.
        finite = xp.isfinite(self.total * unscale)
        if self.norm is not None and self.norm is not self.total:
            # Squares overflow before the gradients do, and nothing can be clipped by an infinite norm.
            finite = xp.logical_and(finite, xp.isfinite(self.norm * unscale))
        if self.single_total is not None:
            # Beside float64 gradients `total` is a float64, which is finite where a float32 gradient is not.
            finite = xp.logical_and(finite, xp.isfinite(self.single_total * unscale))
        return finite if self.half_amax is None else xp.logical_and(finite, self.half_amax * unscale <= FP16.max)

    def seen(self, divisor: Array, loss_finite: Array, xp: Namespace, overflowed: Array | None = None) -> Seen:
        """Returns the facts that the decision is made from, unscaled.

        What was not read keeps `Seen`'s default, which no policy reads that did not ask for it.

        Args:
            divisor: what the gradients are divided by: the scale that made them, or 1 if they are unscaled.
            loss_finite: whether every loss was finite.
            xp: the namespace of the arrays.
            overflowed: whether gradients that are not measured here were not finite.
        """
        finite = self.finite(divisor, xp)
        if overflowed is not None:
            finite = xp.logical_and(finite, xp.logical_not(overflowed))
        return self.seen_with(finite, divisor, loss_finite, xp)

    def seen_with(self, finite: Array, divisor: Array, loss_finite: Array, xp: Namespace) -> Seen:
        """Returns the same where it is known already whether every gradient is `finite`, before and after."""
        # Inf after an overflow: the finite elements say nothing about the others, and a rule that took their maximum
        # would learn a peak that is too low.
        unscale = 1.0 / divisor
        amax = UNREAD.amax if self.amax is None else xp.where(finite, self.amax * unscale, np.inf)
        norm = UNREAD.norm if self.norm is None else xp.where(finite, self.norm * unscale, np.inf)
        share = UNREAD.upper_share if self.upper_share is None else self.upper_share
        return Seen(finite, loss_finite, amax, norm, share)


NOTHING_READ = Measurement(sizes=None, total=np.float32(0))
"""The measurement of a step that reads no gradient."""

AMAX_EVERY = 16
"""Steps between two reads of the largest magnitude where the norm is read at every step. The first 16 steps read both,
so that a policy finds its scale from measured gradients only."""

UNKNOWN_RATIO = 1.0
"""Ratio of amax to norm before one was measured: the bound, as no element is larger than the norm."""


def with_amax(seen: Seen, ratio: Array, xp: Namespace, *, measured: bool) -> tuple[Seen, Array]:
    """Returns `seen` with the largest magnitude, measured or estimated from the norm, and the ratio for later steps.

    Reading both sizes at every step would cost a second pass over the gradients. Their ratio changes slowly, and is
    never above 1. A step in which it is not known (overflow, or gradients that are all zero) keeps the one before.

    Args:
        seen: with the norm; with `amax` too if it was measured.
        ratio: the last ratio of `amax` to `norm`.
        xp: the namespace of the arrays.
        measured: whether this step read `amax`.
    """
    if not measured:
        return replace(seen, amax=seen.norm * ratio), ratio
    found = seen.amax / seen.norm
    # Above 0: gradients so small that only the norm is left after the division say nothing either.
    known = xp.logical_and(xp.isfinite(found), found > 0)
    return seen, xp.where(known, smaller(found, 1.0, xp), ratio)
