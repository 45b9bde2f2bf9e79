"""Exponent histograms: how large gradients are, what a format and a scale would lose of them, and the best scale."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from gradscale._chunks import chunks
from gradscale.formats import FP16, FP32, FloatArray, Format, get_format
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_number, check_scale
from gradscale.record import Array, Record, leaf

__all__ = [
    "EXPONENTS",
    "ExponentHistogram",
    "best_static_scale",
    "exponent_histogram",
    "lost_share",
    "overflow_share",
    "subnormal_share",
]

LOWEST_EXPONENT = math.frexp(FP32.smallest_subnormal)[1] - 1
HIGHEST_EXPONENT = math.frexp(FP32.max)[1] - 1
"""Range of the bins: the exponents of float32. Float64 values beyond are counted in the first and the last bin."""

EXPONENTS = np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
"""Exponent of each bin: bin e counts the magnitudes from 2**e up to, but not including, 2**(e + 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class ExponentHistogram(Record):
    """How many elements lie in each power of two.

    Attributes:
        counts: elements in each bin of `EXPONENTS`.
        zeros: elements that are zero.
        nonfinite: elements that are inf or NaN.
    """

    counts: Array = leaf("int64")
    zeros: Array = leaf("int64", 0)
    nonfinite: Array = leaf("int64", 0)

    def __post_init__(self) -> None:
        if np.shape(self.counts) != EXPONENTS.shape:
            raise ValueError(
                f"`counts` must have one number for each of the {EXPONENTS.size} bins. "
                f"Received: shape {np.shape(self.counts)}."
            )

    def __add__(self, other: "ExponentHistogram") -> "ExponentHistogram":
        """Returns the histogram of both sets of elements together."""
        return ExponentHistogram(self.counts + other.counts, self.zeros + other.zeros, self.nonfinite + other.nonfinite)

    @property
    def nonzero(self) -> int:
        """Elements in the bins: neither zero, nor inf, nor NaN."""
        return int(self.counts.sum())

    @property
    def highest(self) -> int:
        """Exponent of the highest bin that is not empty.

        Raises:
            ValueError: every bin is empty.
        """
        if not self.nonzero:
            raise ValueError("The histogram must hold an element that is not zero. Received: none.")
        return int(EXPONENTS[np.flatnonzero(self.counts)[-1]])


def exponent_histogram(arrays: FloatArray | Iterable[FloatArray]) -> ExponentHistogram:
    """Returns the exponent histogram of an array, or of several together.

    Reads each array once, in chunks. A complex array counts as its real and imaginary parts.

    >>> histogram = exponent_histogram(np.float16([1.0, 1.5, -4.0, 0.0, np.inf]))
    >>> histogram.highest, histogram.nonzero, int(histogram.zeros), int(histogram.nonfinite)
    (2, 3, 1, 1)
    """
    several = cast(Iterable[FloatArray], (arrays,) if isinstance(arrays, np.ndarray) else arrays)
    total = ExponentHistogram(np.zeros(EXPONENTS.size, np.int64))
    with np.errstate(invalid="ignore"):
        for array in several:
            for chunk in chunks(array):
                total = total + _counted(chunk)
    return total


def lost_share(histogram: ExponentHistogram, format: Format | str = FP16, scale: float = 1.0) -> float:
    """Returns the share of nonzero elements that become zero in `format` when multiplied by `scale`.

    Exact for a power of two, except that elements of exactly half the smallest number, which round to zero, count as
    kept. Any other scale splits a bin in two, whose elements are assumed to be uniformly distributed.

    >>> histogram = exponent_histogram(np.float32([1e-8, 1e-3]))
    >>> lost_share(histogram, FP16), lost_share(histogram, FP16, scale=1024.0)
    (0.5, 0.0)
    """
    check_scale("scale", scale)
    return _share(histogram, _below(get_format(format).smallest_subnormal / 2 / scale))


def subnormal_share(histogram: ExponentHistogram, format: Format | str = FP16, scale: float = 1.0) -> float:
    """Returns the share of nonzero elements that are subnormal in `format` when multiplied by `scale`.

    These are not lost, but have fewer digits, down to one bit. As exact as `lost_share`; elements that round up to the
    smallest normal number count as subnormal.

    >>> subnormal_share(exponent_histogram(np.float32([1e-8, 1e-6, 1e-3])), FP16, scale=4.0)
    0.6666666666666666
    """
    check_scale("scale", scale)
    limits = get_format(format)
    return _share(histogram, _below(limits.smallest_normal / scale) - _below(limits.smallest_subnormal / 2 / scale))


def overflow_share(histogram: ExponentHistogram, format: Format | str = FP16, scale: float = 1.0) -> float:
    """Returns the share of nonzero elements that `format` cannot hold when multiplied by `scale`.

    The bin that the format's maximum falls into is split, and its elements are assumed to be uniformly distributed.

    >>> overflow_share(exponent_histogram(np.float32([1.0, 100.0])), FP16, scale=1024.0)
    0.5
    """
    check_scale("scale", scale)
    return _share(histogram, 1.0 - _below(get_format(format).overflow_threshold / scale))


def best_static_scale(
    source: ExponentHistogram | FloatArray | Iterable[FloatArray],
    format: Format | str = FP16,
    margin_bits: float = 2,
) -> float:
    """Returns the largest power of two at which gradients like these do not overflow, even if they grow by the margin.

    The largest loses the least to zero, and a power of two changes no digit of a normal number. It follows from the
    upper end of the highest bin that is not empty, and so does not depend on how the elements are distributed in it.

    Args:
        source: the histogram of unscaled gradients, best of a whole run in float32, or arrays of them. Include the
            gradients of activations: they pass through the format too.
        format: the format that the gradients pass through.
        margin_bits: how many times the gradients may double before they overflow.

    >>> best_static_scale(np.float32([0.9, 1e-7]), margin_bits=3)
    4096.0

    Raises:
        ValueError: every element is zero, or one is inf or NaN, or the margin is negative.
    """
    check_number("margin_bits", margin_bits)
    if not 0 <= margin_bits < math.inf:
        raise ValueError(f"`margin_bits` must not be negative. Received: margin_bits={margin_bits!r}.")
    histogram = source if isinstance(source, ExponentHistogram) else exponent_histogram(source)
    if histogram.nonfinite:
        raise ValueError(
            "The gradients must be finite, or the largest is not known. "
            f"Received: {int(histogram.nonfinite)} elements that are inf or NaN. Measure them at a lower scale."
        )
    bits = math.log2(get_format(format).max) - (histogram.highest + 1) - margin_bits
    return min(max(2.0 ** math.floor(bits), LOWEST_SCALE), HIGHEST_SCALE)


def _counted(chunk: FloatArray) -> ExponentHistogram:
    finite = chunk[np.isfinite(chunk)]
    nonzero = finite[finite != 0]
    # frexp's mantissa lies between 1/2 and 1, so its exponent is one above that of the leading bit.
    exponents = np.clip(np.frexp(nonzero)[1] - 1, LOWEST_EXPONENT, HIGHEST_EXPONENT)
    counts = np.bincount(exponents - LOWEST_EXPONENT, minlength=EXPONENTS.size)
    return ExponentHistogram(
        counts, zeros=np.int64(finite.size - nonzero.size), nonfinite=np.int64(chunk.size - finite.size)
    )


def _below(magnitude: float) -> FloatArray:
    """Returns, for each bin, the share of its elements below `magnitude`, if they are uniformly distributed."""
    # (m - 2**e) / (2**(e + 1) - 2**e), with the denominator 2**e divided out.
    return np.clip(magnitude / 2.0**EXPONENTS - 1.0, 0.0, 1.0)


def _share(histogram: ExponentHistogram, weights: Any) -> float:
    return float((histogram.counts * weights).sum()) / max(1, histogram.nonzero)
