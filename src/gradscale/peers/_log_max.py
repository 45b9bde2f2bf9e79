"""OpenSeq2Seq's `LogMaxScaler`: a running log-normal model of the largest gradient, in TensorFlow's float32."""

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from gradscale.peers._settings import Float32, check_fields, kind
from gradscale.policies.arithmetic import Namespace
from gradscale.policies.contract import ScaleState, Seen, counted
from gradscale.policies.scalars import SCALARS
from gradscale.record import Array, Record, leaf

_LOG2_TOP = 16.0
"""log2 of the target for the model's upper end: 2**16, just above FP16's maximum. A literal in OpenSeq2Seq."""

MOST_LOG_MAX = 62
"""Bound of `log_max`: the square of 2**62, which enters the variance, fits float32 with room for sums."""

MOST_DEVIATIONS = 2.0**100
"""Bound of `overflow_std_dev`: any number whose product with a deviation of 0 is 0."""

LOG2_E = float(np.float32(1) / np.float32(math.log(2)))
"""1 / log(2) in float32: TensorFlow's graph optimizer replaces a division by a constant by this product."""

Decay = Annotated[float, kind("lie from 0 to below 1", lambda x: 0 <= x < 1)]


@dataclass(frozen=True, slots=True)
class LogMaxScalerState(ScaleState):
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


@dataclass(frozen=True, slots=True, repr=False)
class LogMaxScaler(Record):
    """Keeps the scale where the mean of log2(amax) plus some standard deviations would just fit FP16.

    An overflow enters the model as a gradient whose logarithm is 2**log_max (not `log_max`). A step whose gradients are
    all zero changes nothing but the counters. In OpenSeq2Seq its logarithm, minus infinity, makes the scale NaN for
    good.

    The operations and their order are those of OpenSeq2Seq's graph after TensorFlow's graph optimizer. With numpy, the
    logarithm and the power are the C library's, as in TensorFlow. Other frameworks may differ in the last bits.

    Attributes:
        scale_min: the scale never falls below.
        scale_max: the scale never rises above.
        log_max: how high an overflow enters the model.
        beta1: decay of the mean.
        beta2: decay of the means from which the deviation comes.
        overflow_std_dev: standard deviations above the mean that must still fit.
    """

    scale_min: Float32 = 1.0
    scale_max: Float32 = 2.0**14
    log_max: Annotated[float, kind(f"lie between 0 and {MOST_LOG_MAX}", lambda x: 0 <= x <= MOST_LOG_MAX)] = 16.0
    beta1: Decay = 0.99
    beta2: Decay = 0.999
    overflow_std_dev: Annotated[
        float, kind(f"lie between 0 and {MOST_DEVIATIONS}", lambda x: 0 <= x <= MOST_DEVIATIONS)
    ] = 3.09

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite", "amax"})

    def __post_init__(self) -> None:
        check_fields(self)

    def start(self) -> LogMaxScalerState:
        """Returns the state before the first step: a scale of 1, whatever the bounds."""
        return LogMaxScalerState(scale=np.float32(1))

    @np.errstate(all="ignore")
    def next(self, state: LogMaxScalerState, seen: Seen, xp: Namespace) -> LogMaxScalerState:
        """Returns the state after one step. `stuck` means that an overflow could not lower the scale."""
        clean = xp.logical_and(seen.finite, xp.isfinite(seen.amax))
        # 2**log_max as in OpenSeq2Seq, although `x` is a logarithm.
        all_zero = xp.logical_and(clean, xp.logical_not(seen.amax > 0))
        amax = xp.where(all_zero, 1.0, seen.amax)
        x = xp.where(clean, log2(amax, xp), exp2(self.log_max, xp))
        model = {
            "x_hat": state.x_hat * self.beta1 + x * (1 - self.beta1),
            "slow_x_hat": state.slow_x_hat * self.beta2 + x * (1 - self.beta2),
            "xsquared_hat": state.xsquared_hat * self.beta2 + x * (1 - self.beta2) * x,
            "b1_correction": state.b1_correction * self.beta1,
            "b2_correction": state.b2_correction * self.beta2,
        }
        scale = xp.where(all_zero, state.scale, self._proposed(model, xp))
        model = {name: xp.where(all_zero, getattr(state, name), new) for name, new in model.items()}
        lowered = scale < state.scale
        stuck = xp.logical_not(xp.logical_or(clean, lowered))
        return counted(state, xp.logical_and(clean, seen.loss_finite), xp, scale=scale, stuck=stuck, **model)

    def _proposed(self, model: dict[str, Array], xp: Any) -> Array:
        """Returns the scale for the model's upper end."""
        # The difference of two means of nearly equal size may round below zero.
        mean = model["x_hat"] / (1.0 - model["b1_correction"])
        slow_mean = model["slow_x_hat"] / (1.0 - model["b2_correction"])
        variance = model["xsquared_hat"] / (1.0 - model["b2_correction"]) - slow_mean * slow_mean
        deviation = xp.sqrt(xp.where(variance < 0, 0.0, variance))
        scale = exp2((_LOG2_TOP - mean) - deviation * self.overflow_std_dev, xp)
        # Comparisons, not a maximum and a minimum: a NaN must stay NaN, as in OpenSeq2Seq.
        scale = xp.where(scale > self.scale_max, self.scale_max, scale)
        return xp.where(scale < self.scale_min, self.scale_min, scale)


def log2(x: Array, xp: Any) -> Array:
    """Returns the base-2 logarithm of float32 numbers: natural logarithm, then a rounded constant.

    TensorFlow's CPU kernel calls the C library's `logf` for a scalar, so numpy's numbers go there too.
    """
    return (_on_each(_c_function("logf", 1), x) if xp in (np, SCALARS) else xp.log(x)) * LOG2_E


def exp2(x: Array, xp: Any) -> Array:
    """Returns 2 to the power of float32 numbers, from the C library like `log2`."""
    return _on_each(functools.partial(_c_function("powf", 2), 2.0), x) if xp in (np, SCALARS) else 2.0**x


@np.errstate(all="ignore")
def _on_each(function: Callable[..., float], x: Array) -> Array:
    return np.asarray(np.frompyfunc(function, 1, 1)(np.float32(x)), dtype=np.float32)[()]


@functools.cache
def _c_function(name: str, arity: int) -> Callable[..., float]:
    """Returns a float32 function of the C library, or numpy's float64 function where the library cannot be loaded."""
    # Rounded to float32, numpy's differs from the usual C libraries in the last bit for one number in a thousand.
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (TypeError, OSError, AttributeError):
        return {"logf": np.log, "powf": np.power}[name]
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * arity
    return function
