"""Measure: one read of each gradient."""

import math
from typing import NamedTuple

import numpy as np

from gradscale._chunks import chunks
from gradscale.engine.culprits import count_nonfinite
from gradscale.engine.plan import Plan
from gradscale.numpy.tree import WIDE, FloatArray


class ArrayMeasurement(NamedTuple):
    """What one read of one gradient found, still scaled.

    Attributes:
        amax: largest magnitude; inf or NaN where an element is, before or after it is divided.
        norm: Euclidean norm; 0 where it was not asked for.
        nonfinite: elements that are inf or NaN, before or after they are divided.
        above: elements above the policy's edge, inf and NaN among them.
        size: elements.
    """

    amax: float
    norm: float
    nonfinite: int
    above: int
    size: int


# "invalid" is a signaling NaN that becomes float64, "over" a gradient too large for float32: in both cases it is found
# not to be finite.
@np.errstate(invalid="ignore", over="ignore")
def measure(array: FloatArray, divisor: float, plan: Plan) -> ArrayMeasurement:
    """Returns what one read of `array` finds. One that is not finite is read again, to count the elements.

    The read goes chunk by chunk in float64, so that no temporary grows with the array and no square overflows. A
    complex array counts as its real and imaginary parts.
    """
    amax, norm, above = 0.0, 0.0, 0
    for chunk in chunks(array):
        magnitudes = np.abs(chunk)
        peak = float(magnitudes.max())
        amax = float(np.maximum(amax, peak))  # which, unlike Python's `max`, keeps a NaN
        if plan.norm:
            norm = math.hypot(norm, _norm(magnitudes, peak))
        if plan.edge is not None and not peak <= plan.edge:
            above += int(np.count_nonzero(~(magnitudes <= plan.edge)))
    # The type in which `apply` returns this gradient, and the factor by which it gets there.
    wide = np.finfo(WIDE[array.dtype.name]).dtype.type
    factor = float(np.float32(1.0) / np.float32(divisor))
    unscaled = float(wide(amax * factor))
    if math.isfinite(unscaled):
        return ArrayMeasurement(amax, norm, 0, above, array.size)
    return ArrayMeasurement(unscaled, norm, count_nonfinite(array, factor, wide), above, array.size)


def _norm(magnitudes: FloatArray, peak: float) -> float:
    """Returns the norm, by way of a power of two near the peak: squares of float64 would overflow or vanish."""
    exponent = math.frexp(peak)[1] if math.isfinite(peak) else 0
    power = 2.0 ** -min(max(exponent, -1000), 1000)
    shrunk = magnitudes * power
    return math.sqrt(float(np.dot(shrunk, shrunk))) / power
