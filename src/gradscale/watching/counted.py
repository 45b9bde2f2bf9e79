"""What was counted of the tensors of a step, in little memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscale.formats import FloatArray
from gradscale.histogram.counts import EXPONENTS, ExponentHistogram, shifted


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of tensors: only the bins from the lowest to the highest in use.

    Attributes:
        rows: the row of each tensor in the arrays below.
        bins: elements in each bin in use, of the tensors as they were counted.
        first: the first bin in use.
        outside: elements that are zero, inf and NaN.
        amax: the largest magnitude; NaN where there is one.
        dtypes: the type of each tensor, as its framework writes it.
        scales: what each tensor was multiplied by in the backward pass.
        shifts: powers of two that the counted numbers have to be multiplied by to be unscaled; 0 where they are.
    """

    rows: Sequence[int]
    bins: FloatArray
    first: int
    outside: FloatArray
    amax: FloatArray
    dtypes: Sequence[Any]
    scales: Sequence[float]
    shifts: Sequence[int]

    def histogram(self, slot: int) -> ExponentHistogram:
        """Returns the histogram of a tensor, unscaled."""
        row, counts = self.rows[slot], np.zeros(EXPONENTS.size, np.int64)
        counts[self.first : self.first + self.bins.shape[1]] = self.bins[row]
        return shifted(ExponentHistogram(counts, *self.outside[row]), self.shifts[slot])

    def largest(self, slot: int) -> float:
        """Returns the largest magnitude of a tensor, unscaled."""
        return math.ldexp(float(self.amax[self.rows[slot]]), self.shifts[slot])


def counted_of(
    bins: FloatArray,
    outside: FloatArray,
    amax: FloatArray,
    dtypes: Sequence[Any],
    scales: Sequence[float],
    shifts: Sequence[int],
    rows: Sequence[int] | None = None,
) -> Counted:
    """Returns the counts of tensors by all bins, without those that no tensor uses; by default in their order."""
    used = np.flatnonzero(bins.any(axis=0))
    first, end = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
    places = range(len(dtypes)) if rows is None else rows
    return Counted(places, bins[:, first:end].copy(), first, outside, amax, dtypes, scales, shifts)


def unscaling_bits(scale: float) -> int | None:
    """Returns the power of two that unscales numbers by moving them to other bins; None if they must be divided.

    >>> unscaling_bits(1024.0), unscaling_bits(1.0), unscaling_bits(1000.0)
    (-10, 0, None)
    """
    mantissa, exponent = math.frexp(scale)
    return 1 - exponent if mantissa == 0.5 else None
