"""The scale that a log-normal model of the largest gradient allows."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscale.arithmetic import Namespace, bounded, larger
from gradscale.formats import FP16, Format
from gradscale.policy import HIGHEST_SCALE, as_single, check_bounds
from gradscale.predictive._checks import check_format, check_share
from gradscale.predictive._steering import (
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
from gradscale.state import Seen

WIDEST = 126.0
"""Exponents of the peak are kept between -126 and 126, where it is a normal float32 number."""


@dataclass(frozen=True, slots=True)
class LogMaxState(SteeredState):
    """State of `LogMax`. Its `peak` lies `deviations` above the mean of the model.

    Attributes:
        mean: running mean of log2 of the largest gradient.
        variance: running variance of the same. It starts at 1: one observation's worth of belief in a factor of two.
        novelty: weight of the next observation while there are few: 1, 1/2, 1/3, ...
    """

    mean: Array = leaf("float32", 0, signed=True)
    variance: Array = leaf("float32", 1)
    novelty: Array = leaf("float32", 1)


@dataclass(frozen=True, slots=True)
class LogMax(Record):
    """Sets the scale by a log-normal model of the largest gradient.

    It keeps the running mean and variance of log2(amax), and the scale is the largest power of two with which a
    gradient `deviations` standard deviations above the mean still fits the format. The last gradient seen counts as
    the mean where it is larger, so that a sudden rise is followed at once. The idea is OpenSeq2Seq's, whose own rule
    is `gradscale.preset("openseq2seq", "LogMax")`; there, an overflow enters the mean as 65536 bits and no scale rises
    above 2**14.

    Overflows are not part of the model: they teach a ceiling, as in `Headroom`.

    Scales are powers of two, but the model behind them is rounded differently by different frameworks: where it stands
    within a hair of a power of two, one framework may take it and another the next lower.

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
        if not 0 <= deviations <= 100:
            raise ValueError(f"`deviations` must be between 0 and 100. Received: deviations={self.deviations!r}.")
        object.__setattr__(self, "deviations", deviations)

    def start(self) -> LogMaxState:
        """Returns the state before the first step."""
        scale = np.float32(self.init_scale)
        return LogMaxState(scale=scale, ceiling=highest(self.format, scale), drop=np.float32(1 / stride(self.format)))

    def next(self, state: LogMaxState, seen: Seen, xp: Namespace) -> LogMaxState:
        """Returns the state after one step.

        A clean step enters the model and moves the scale to what it allows. An overflow lowers the scale by 1, 2, 4,
        8, 16 bits in a row, and by 16 at once while no gradient was seen. A step whose gradients are all zero tells
        nothing, unless the scale may be the reason: then it rises by 16 bits. A non-finite loss changes nothing but
        the counters. Does not wait for the device.
        """
        sight = sighting(state, seen, xp)
        observed = xp.log2(sight.amax)
        mean, variance, novelty = self._model(state, observed, xp)
        exponent = larger(mean, observed, xp) + self.deviations * variance**0.5
        peak = 2.0 ** bounded(exponent, -WIDEST, WIDEST, xp)
        limit = highest(self.format, state.scale)
        helm = Helm(self.format, limit, RECOVERY, CLIMB_BITS, self.min_scale, self.max_scale)
        told = sight.told
        return steered(
            state,
            seen,
            sight,
            peak,
            helm,
            xp,
            mean=xp.where(told, mean, state.mean),
            variance=xp.where(told, variance, state.variance),
            novelty=xp.where(told, novelty, state.novelty),
        )

    def _model(self, state: LogMaxState, observed: Array, xp: Namespace) -> tuple[Array, Array, Array]:
        """Returns the mean, the variance and the novelty once `observed` has entered the model.

        While there are fewer observations than `beta1` and `beta2` look back on, all weigh the same. The variance
        counts one more, which it starts with.
        """
        novelty = state.novelty / (1.0 + state.novelty)
        surprise = observed - state.mean
        mean = state.mean + surprise * larger(1.0 - self.beta1, state.novelty, xp)
        spread = surprise * (observed - mean)
        variance = state.variance + (spread - state.variance) * larger(1.0 - self.beta2, novelty, xp)
        return mean, larger(variance, 0.0, xp), novelty
