"""Room one, measure: one read of each gradient. Room two, agree: one answer for all of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscale._chunks import chunks
from gradscale.formats import FP32
from gradscale.numpy.tree import WIDE, FloatArray
from gradscale.policies.contract import Seen


@dataclass(frozen=True, slots=True)
class Measured:
    """What one read of one gradient, or of a chunk of it, found.

    Attributes:
        amax: largest magnitude among the finite elements.
        norm: Euclidean norm; inf or NaN where an element is; 0 where it was not asked for.
        infs: elements that are infinite, or become so when the scale is divided out.
        nans: elements that are NaN.
        above: elements that are above the edge a policy watches; inf and NaN are.
        size: elements.
    """

    amax: float
    norm: float
    infs: int
    nans: int
    above: int
    size: int

    @property
    def finite(self) -> bool:
        """No element is inf or NaN, before or after unscaling."""
        return not self.infs and not self.nans


def measure(array: FloatArray, unscale: float, *, norm: bool = False, edge: float = math.inf) -> Measured:
    """Returns what one read of `array` finds, in true units.

    The read goes chunk by chunk in float64, so that no temporary grows with the array and no square overflows. A
    complex array counts as its real and imaginary parts.

    Args:
        array: a gradient, scaled.
        unscale: what it will be multiplied by to become true.
        norm: whether to measure the norm.
        edge: magnitude, scaled, above which elements are counted.
    """
    wide = np.finfo(WIDE[array.dtype.name]).dtype.type
    # "invalid" is a signalling NaN that becomes float64, "over" a gradient too large for float32: both are counted.
    with np.errstate(invalid="ignore", over="ignore"):
        pieces = [_look(chunk, unscale, wide, norm, edge) for chunk in chunks(array)]
        return Measured(
            amax=float(wide(max((piece.amax for piece in pieces), default=0.0) * unscale)),
            norm=math.hypot(*(piece.norm for piece in pieces)) * unscale,
            infs=sum(piece.infs for piece in pieces),
            nans=sum(piece.nans for piece in pieces),
            above=sum(piece.above for piece in pieces),
            size=array.size,
        )


def agree(measured: Sequence[Measured], *, loss_finite: bool) -> Seen:
    """Returns what the arrays of a step amount to together: the facts that the decision is made from."""
    return Seen(
        finite=np.bool_(all(one.finite for one in measured)),
        loss_finite=np.bool_(loss_finite),
        amax=np.float32(min(max((one.amax for one in measured), default=0.0), FP32.max)),
        norm=np.float64(math.hypot(*(one.norm for one in measured))),
        upper_share=np.float32(sum(one.above for one in measured) / max(1, sum(one.size for one in measured))),
    )


def _look(chunk: FloatArray, unscale: float, wide: Any, norm: bool, edge: float) -> Measured:
    """Returns what is found in one chunk, as it came: still scaled."""
    magnitudes = np.abs(chunk)
    peak = float(magnitudes.max())
    length = _norm(magnitudes, peak) if norm else 0.0
    above = 0 if peak <= edge else int(np.count_nonzero(~(magnitudes <= edge)))
    infs = nans = 0
    if not math.isfinite(peak):
        infs = int(np.count_nonzero(np.isinf(magnitudes)))
        nans = int(np.count_nonzero(np.isnan(magnitudes)))
        magnitudes = magnitudes[np.isfinite(magnitudes)]
        peak = float(magnitudes.max(initial=0.0))
    if not np.isfinite(wide(peak * unscale)):
        infs += int(np.count_nonzero(~np.isfinite((magnitudes * unscale).astype(wide))))
    return Measured(peak, length, infs, nans, above, chunk.size)


def _norm(magnitudes: FloatArray, peak: float) -> float:
    """Returns the norm, by way of a power of two near the peak: squares of float64 would overflow or vanish."""
    exponent = math.frexp(peak)[1] if math.isfinite(peak) else 0
    power = 2.0 ** -min(max(exponent, -1000), 1000)
    shrunk = magnitudes * power
    return math.sqrt(float(np.dot(shrunk, shrunk))) / power
