"""The scale that a log-normal model of the largest gradient allows."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from gradscale.policies.arithmetic import Namespace, bounded, exp2_linear, larger, log2_linear, root, smaller
from gradscale.policies.checks import (
    FORMAT_FP16,
    HIGHEST_PEAK,
    HIGHEST_SCALE,
    USELESS_SCALE,
    FormatField,
    as_single,
    check_bounds,
    check_format,
    check_share,
)
from gradscale.policies.contract import Seen
from gradscale.policies.headroom import RECOVERY, HeadroomState, follow
from gradscale.record import Array, Record, leaf

HIGHEST_EXPONENT = 126.0
"""Exponents of the peak are kept between -126 and 126, where it is a normal float32 number."""

MOST_DEVIATIONS = 100
"""Bound of `deviations`, far beyond any use."""


@dataclass(frozen=True, slots=True)
class LogMaxState(HeadroomState):
    """State of `LogMax`. Its `peak` lies `deviations` above the mean of the model.

    Attributes:
        mean: running mean of log2 of the largest gradient.
        variance: running variance of the same. It starts at 1, as if one step had shown a standard deviation of a bit.
        observations: gradients seen so far.
    """

    mean: Array = leaf("float32", 0, signed=True)
    variance: Array = leaf("float32", 1)
    observations: Array = leaf("float32", 0)


@dataclass(frozen=True, slots=True, repr=False)
class LogMax(Record):
    """Sets the scale by a log-normal model of the largest gradient.

    It keeps the running mean and variance of log2(amax), and the scale is the largest power of two with which a
    gradient `deviations` standard deviations above the mean still fits the format. The last gradient seen counts as
    the mean where it is larger, so that a sudden rise is followed at once. The idea is OpenSeq2Seq's, whose own rule
    is `gradscale.preset("openseq2seq", "LogMax")`; there, an overflow enters the mean as 65536 bits and no scale rises
    above 2**14.

    Overflows are not part of the model: they lower a ceiling, as in `Headroom`. The second scale, which one gradient
    sets, is 4 bits below what the model allows.

    Scales are bit-exact on every framework. To that end the logarithm is linear between powers of two, which is at most
    0.09 too low.

    Attributes:
        format: the format that the gradients must fit, or its name, such as `"fp16"`.
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
    2**10
    2**15
    2**15
    2**15
    """

    format: FormatField = FORMAT_FP16
    init_scale: float = 16.0
    beta1: float = 0.99
    beta2: float = 0.999
    deviations: float = 3.09
    min_scale: float = field(default=USELESS_SCALE, kw_only=True)
    max_scale: float = field(default=HIGHEST_SCALE, kw_only=True)

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite", "amax"})
    is_compiled: ClassVar[bool] = True

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
        return LogMaxState(scale=np.float32(self.init_scale))

    def next(self, state: LogMaxState, seen: Seen, xp: Namespace) -> LogMaxState:
        """Returns the state after one step.

        A clean step enters the model and moves the scale to what it allows. Overflows, gradients that are all zero and
        non-finite losses do as in `Headroom`. Does not synchronize with the device.
        """
        return follow(self, min(self.format.max, HIGHEST_PEAK), RECOVERY, state, seen, xp)

    def predict(self, state: LogMaxState, amax: Array, xp: Namespace) -> dict[str, Array]:
        """Returns the model after a step whose largest gradient was `amax`, and the peak that it predicts.

        The model is updated as Welford's, with decaying weights. While there are fewer observations than `beta1` and
        `beta2` average over, all weigh the same. The variance counts one more, which it starts with.
        """
        size = log2_linear(amax, xp)
        # Not E[x**2] - E[x]**2, as in OpenSeq2Seq: its two terms cancel in float32, and the variance may be negative.
        count = state.observations + 1.0
        error = size - state.mean
        mean = state.mean + error / smaller(count, _memory(self.beta1, count), xp)
        # Below 0 by rounding only. The bound also keeps a compiler from fusing the product into a multiply-add.
        spread = larger(error * (size - mean), 0.0, xp)
        change = (spread - state.variance) / smaller(count + 1.0, _memory(self.beta2, count), xp)
        variance = larger(state.variance + change, 0.0, xp)
        # The larger of both: the mean alone, over 100 steps, would follow a sudden rise too slowly.
        # Bounding the product, and not only the sum, keeps a compiler from fusing the two into a multiply-add.
        above = bounded(self.deviations * root(variance), 0.0, 2 * HIGHEST_EXPONENT, xp)
        peak = exp2_linear(bounded(larger(mean, size, xp) + above, -HIGHEST_EXPONENT, HIGHEST_EXPONENT, xp), xp)
        return {"mean": mean, "variance": variance, "observations": count, "peak": peak}


def _memory(beta: Array, like: Array) -> Array:
    """Returns how many steps an average with decay `beta` is taken over, in the type of `like`."""
    # In the type of `like`: Python would compute in float64, and round a second time to float32.
    return 1.0 / (like * 0 + 1.0 - beta)
