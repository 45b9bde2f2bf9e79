"""The scale that a log-normal model of the largest gradient allows."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscale.formats import FP16, Format
from gradscale.policies.arithmetic import Namespace, bounded, larger, smaller
from gradscale.policies.checks import HIGHEST_SCALE, as_single, check_bounds, check_format, check_share
from gradscale.policies.contract import Seen
from gradscale.policies.logarithms import exp2_linear, log2_linear, root
from gradscale.policies.peak import (
    CLIMB_BITS,
    RECOVERY,
    Helm,
    SteeredState,
    highest,
    sighting,
    steered,
    stride,
)
from gradscale.record import Array, Record, leaf

WIDEST = 126.0
"""Exponents of the peak are kept between -126 and 126, where it is a normal float32 number."""

MOST_DEVIATIONS = 100


@dataclass(frozen=True, slots=True)
class LogMaxState(SteeredState):
    """State of `LogMax`. Its `peak` lies `deviations` above the mean of the model.

    Attributes:
        mean: running mean of log2 of the largest gradient.
        variance: running variance of the same. It starts at 1, as if one step had shown a standard deviation of a bit.
        observed: gradients seen so far.
    """

    mean: Array = leaf("float32", 0, signed=True)
    variance: Array = leaf("float32", 1)
    observed: Array = leaf("float32", 0)


@dataclass(frozen=True, slots=True)
class LogMax(Record):
    """Sets the scale by a log-normal model of the largest gradient.

    It keeps the running mean and variance of log2(amax), and the scale is the largest power of two with which a
    gradient `deviations` standard deviations above the mean still fits the format. The last gradient seen counts as
    the mean where it is larger, so that a sudden rise is followed at once. The idea is OpenSeq2Seq's, whose own rule
    is `gradscale.preset("openseq2seq", "LogMax")`; there, an overflow enters the mean as 65536 bits and no scale rises
    above 2**14.

    Overflows are not part of the model: they teach a ceiling, as in `Headroom`.

    Scales have the same bits on every framework. To that end the logarithm is linear between powers of two, which is at
    most 0.09 too low.

    Attributes:
        format: the format that the gradients must fit.
        init_scale: scale of the first step.
        beta1: how much of the mean is kept at a step.
        beta2: how much of the variance is kept at a step.
        deviations: standard deviations above the mean that must fit. With 3.09, one step in 1,000 would not, were the
            model exact.
        min_scale: the scale never falls below.
        max_scale: the scale never rises above.

    >>> policy = LogMax()
    >>> state = policy.start()
    >>> for amax in (0.5, 0.25, 0.5, 0.25):
    ...     state = policy.next(state, Seen(amax=np.float32(amax)), np)
    ...     print(f"2**{np.log2(state.scale):.0f}")
    2**14
    2**15
    2**15
    2**15
    """

    format: Format = FP16
    init_scale: float = 2.0**16
    beta1: float = 0.99
    beta2: float = 0.999
    deviations: float = 3.09
    min_scale: float = 2.0**-24
    max_scale: float = HIGHEST_SCALE

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite", "amax"})

    def __post_init__(self) -> None:
        check_format(self)
        check_bounds(self)
        check_share(self, "beta1", "beta2")
        deviations = as_single("deviations", self.deviations)
        if not 0 <= deviations <= MOST_DEVIATIONS:
            raise ValueError(f"`deviations` must be between 0 and 100. Received: deviations={self.deviations!r}.")
        object.__setattr__(self, "deviations", deviations)

    def start(self) -> LogMaxState:
        """Returns the state before the first step."""
        scale = np.float32(self.init_scale)
        return LogMaxState(
            scale=scale, ceiling=np.float32(highest(self.format, scale)), drop=np.float32(1 / stride(self.format))
        )

    def next(self, state: LogMaxState, seen: Seen, xp: Namespace) -> LogMaxState:
        """Returns the state after one step.

        A clean step enters the model and moves the scale to what it allows. An overflow lowers the scale by 1, 2, 4,
        8, 16 bits in a row, and by 16 at once while no gradient was seen. A step whose gradients are all zero tells
        nothing, unless the scale may be the reason: then it rises by 16 bits. A non-finite loss changes nothing but
        the counters. Does not wait for the device.
        """
        sight = sighting(state, seen, xp)
        size = log2_linear(sight.amax, xp)
        mean, variance, observed = self._model(state, size, xp)
        # Bounding the product, and not only the sum, keeps a compiler from fusing the two.
        above = bounded(self.deviations * root(variance), 0.0, 2 * WIDEST, xp)
        peak = exp2_linear(bounded(larger(mean, size, xp) + above, -WIDEST, WIDEST, xp), xp)
        limit = highest(self.format, state.scale)
        helm = Helm(self.format, limit, RECOVERY, CLIMB_BITS, self.min_scale, self.max_scale)
        model = {"mean": mean, "variance": variance, "observed": observed}
        kept = {name: xp.where(sight.told, new, getattr(state, name)) for name, new in model.items()}
        return steered(state, seen, sight, peak, helm, xp, **kept)

    def _model(self, state: LogMaxState, size: Array, xp: Namespace) -> tuple[Array, Array, Array]:
        """Returns the mean, the variance and the number of observations once `size` has entered the model.

        While there are fewer observations than `beta1` and `beta2` look back on, all weigh the same. The variance
        counts one more, which it starts with.
        """
        observed = state.observed + 1.0
        surprise = size - state.mean
        mean = state.mean + surprise / smaller(observed, _memory(self.beta1, observed), xp)
        spread = larger(surprise * (size - mean), 0.0, xp)
        change = (spread - state.variance) / smaller(observed + 1.0, _memory(self.beta2, observed), xp)
        return mean, larger(state.variance + change, 0.0, xp), observed


def _memory(beta: Array, like: Array) -> Array:
    """Returns how many steps an average with decay `beta` looks back on, in the type of `like`."""
    return 1.0 / (like * 0 + 1.0 - beta)
