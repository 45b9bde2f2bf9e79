"""OpenSeq2Seq's `LogMaxScaler`: a running log-normal model of the largest gradient, in TensorFlow's float32."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from gradscale.arithmetic import Namespace
from gradscale.peers._libm import exp2, log2
from gradscale.policy import as_single, counted
from gradscale.record import Array, Record, fields, leaf
from gradscale.state import ScaleState, Seen

_LOG2_TOP = 16.0
"""Where the model's upper end shall lie: 2**16, just above the largest FP16 number. A literal in OpenSeq2Seq."""


@dataclass(frozen=True, slots=True)
class LogMaxState(ScaleState):
    """State of a `LogMaxScaler`, under the names of OpenSeq2Seq's variables.

    Attributes:
        x_hat: running mean of the logarithm, with the faster decay.
        slow_x_hat: running mean of the logarithm, with the slower decay.
        xsquared_hat: running mean of its square, with the slower decay.
        b1_correction: what the faster means still lack of their full weight.
        b2_correction: what the slower means still lack of their full weight.
    """

    x_hat: Array = leaf("float32", 0, signed=True)
    slow_x_hat: Array = leaf("float32", 0, signed=True)
    xsquared_hat: Array = leaf("float32", 0)
    b1_correction: Array = leaf("float32", 1)
    b2_correction: Array = leaf("float32", 1)


@dataclass(frozen=True, slots=True)
class LogMaxScaler(Record):
    """Keeps the scale where mean plus `deviations` standard deviations of log2(amax) would just fit FP16.

    An overflow enters the model as a gradient whose logarithm is `overflow_log2`. All-zero gradients enter it as minus
    infinity and make the scale NaN for good, as they do in OpenSeq2Seq.

    Exact to the bit with numpy: the operations and their order are those of the graph that TensorFlow's optimizer makes
    of OpenSeq2Seq's program.

    Attributes:
        scale_min: the scale never falls below.
        scale_max: the scale never rises above.
        overflow_log2: what an overflow counts as. OpenSeq2Seq takes 2**log_max here, not log_max.
        beta1: decay of the faster mean.
        gain1: weight of a new value in the faster mean: 1 - beta1.
        beta2: decay of the slower means.
        gain2: weight of a new value in the slower means: 1 - beta2.
        deviations: standard deviations above the mean that shall still fit.
    """

    scale_min: float
    scale_max: float
    overflow_log2: float
    beta1: float
    gain1: float
    beta2: float
    gain2: float
    deviations: float

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite", "amax"})

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, as_single(field.name, getattr(self, field.name)))

    @classmethod
    def build(
        cls, scale_min: float, scale_max: float, log_max: float, beta1: float, beta2: float, deviations: float
    ) -> Self:
        """Returns the policy, from the settings as OpenSeq2Seq takes them."""
        overflow_log2 = float(exp2(np.float32(log_max), np))
        return cls(scale_min, scale_max, overflow_log2, beta1, 1 - beta1, beta2, 1 - beta2, deviations)

    def start(self) -> LogMaxState:
        """Returns the state before the first step: a scale of 1, whatever the bounds."""
        return LogMaxState(scale=np.float32(1))

    @np.errstate(all="ignore")
    def next(self, state: LogMaxState, seen: Seen, xp: Namespace) -> LogMaxState:
        """Returns the state after one step. `stuck` says that an overflow could not lower the scale."""
        clean = xp.logical_and(xp.logical_and(seen.finite, seen.loss_finite), xp.isfinite(seen.amax))
        x = xp.where(clean, log2(seen.amax, xp), self.overflow_log2)
        model = {
            "x_hat": state.x_hat * self.beta1 + x * self.gain1,
            "slow_x_hat": state.slow_x_hat * self.beta2 + x * self.gain2,
            "xsquared_hat": state.xsquared_hat * self.beta2 + x * self.gain2 * x,
            "b1_correction": state.b1_correction * self.beta1,
            "b2_correction": state.b2_correction * self.beta2,
        }
        scale = self._proposed(model, xp)
        lowered = scale < state.scale
        stuck = xp.logical_not(xp.logical_or(clean, lowered))
        return counted(state, clean, xp, scale=scale, stuck=stuck, **model)

    def _proposed(self, model: dict[str, Array], xp: Any) -> Array:
        """Returns the scale for the model's upper end. `where` and not a maximum, so that NaN stays NaN."""
        mean = model["x_hat"] / (1.0 - model["b1_correction"])
        slow_mean = model["slow_x_hat"] / (1.0 - model["b2_correction"])
        variance = model["xsquared_hat"] / (1.0 - model["b2_correction"]) - slow_mean * slow_mean
        deviation = xp.sqrt(xp.where(variance < 0, 0.0, variance))
        scale = exp2((_LOG2_TOP - mean) - deviation * self.deviations, xp)
        scale = xp.where(scale > self.scale_max, self.scale_max, scale)
        return xp.where(scale < self.scale_min, self.scale_min, scale)
