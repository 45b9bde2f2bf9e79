"""What a format and a scale lose of the elements of a histogram, and of their energy."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscale.formats import FP16, FloatArray, Format, get_format
from gradscale.histogram.counts import EXPONENTS, ExponentHistogram
from gradscale.policies.checks import check_scale

BIN = 2.0**EXPONENTS
"""The lower end of each bin, which is also its width."""

ENERGY = 7 / 3 * BIN**2
"""Mean square of an element of each bin, if uniformly distributed: the integral of x**2 from 1 to 2 is 7/3."""


@dataclass(frozen=True, slots=True)
class Losses:
    """What becomes of gradients in a format at a scale: shares of nonzero elements, and of the sum of their squares.

    Attributes:
        flushed: share of elements that become zero.
        subnormal: share of elements that are kept with fewer digits.
        overflow: share of elements that the format cannot hold.
        flushed_energy: share of the sum of squares in elements that become zero.
        subnormal_energy: share of the sum of squares in subnormal elements.
        overflow_energy: share of the sum of squares in elements that overflow.
        snr_db: ratio of signal to rounding noise in decibels, with elements that overflow clipped to the maximum; inf
            for a histogram without a nonzero element.
    """

    flushed: float
    subnormal: float
    overflow: float
    flushed_energy: float
    subnormal_energy: float
    overflow_energy: float
    snr_db: float


def losses(histogram: ExponentHistogram, format: Format | str = FP16, scale: float = 1.0) -> Losses:
    """Returns what `format` loses of the elements when they are multiplied by `scale`.

    Elements are assumed to be uniformly distributed within a bin. The shares of elements that are flushed or subnormal
    do not depend on that if the scale is a power of two, except that elements of exactly half the smallest number,
    which round to zero, count as kept. Those of energy, of overflow and `snr_db` do. Inf and NaN are left out.

    >>> from gradscale.histogram import exponent_histogram
    >>> found = losses(exponent_histogram(np.float32([1e-8, 1e-6, 1e-3])), FP16, scale=4.0)
    >>> round(found.subnormal, 3), found.flushed, found.flushed_energy
    (0.667, 0.0, 0.0)
    """
    check_scale("scale", scale)
    limits = get_format(format)
    counts = histogram.host_counts.astype(np.float64)
    flushed, subnormal, highest = (
        edge / scale for edge in (limits.smallest_subnormal / 2, limits.smallest_normal, limits.overflow_threshold)
    )
    energy = counts * ENERGY
    return Losses(
        _share(counts, _below(flushed)),
        _share(counts, _below(subnormal) - _below(flushed)),
        _share(counts, 1.0 - _below(highest)),
        _share(energy, _energy_below(flushed)),
        _share(energy, _energy_below(subnormal) - _energy_below(flushed)),
        _share(energy, 1.0 - _energy_below(highest)),
        _decibels(energy.sum(), float((counts * _noise(limits, scale)).sum())),
    )


def lost_share(histogram: ExponentHistogram, format: Format | str = FP16, scale: float = 1.0) -> float:
    """Returns the share of nonzero elements that become zero in `format` when multiplied by `scale`.

    Exact for a power of two, except that elements of exactly half the smallest number, which round to zero, count as
    kept. Any other scale splits a bin in two, whose elements are assumed to be uniformly distributed.

    >>> from gradscale.histogram import exponent_histogram
    >>> histogram = exponent_histogram(np.float32([1e-8, 1e-3]))
    >>> lost_share(histogram, FP16), lost_share(histogram, FP16, scale=1024.0)
    (0.5, 0.0)
    """
    return losses(histogram, format, scale).flushed


def subnormal_share(histogram: ExponentHistogram, format: Format | str = FP16, scale: float = 1.0) -> float:
    """Returns the share of nonzero elements that are subnormal in `format` when multiplied by `scale`.

    These are not lost, but have fewer digits, down to one bit. As exact as `lost_share`; elements that round up to the
    smallest normal number count as subnormal.

    >>> from gradscale.histogram import exponent_histogram
    >>> subnormal_share(exponent_histogram(np.float32([1e-8, 1e-6, 1e-3])), FP16, scale=4.0)
    0.6666666666666666
    """
    return losses(histogram, format, scale).subnormal


def overflow_share(histogram: ExponentHistogram, format: Format | str = FP16, scale: float = 1.0) -> float:
    """Returns the share of nonzero elements that `format` cannot hold when multiplied by `scale`.

    The bin that the format's maximum falls into is split, and its elements are assumed to be uniformly distributed.

    >>> from gradscale.histogram import exponent_histogram
    >>> overflow_share(exponent_histogram(np.float32([1.0, 100.0])), FP16, scale=1024.0)
    0.5
    """
    return losses(histogram, format, scale).overflow


def _below(magnitude: float) -> FloatArray:
    """Returns, for each bin, the share of its elements below `magnitude`."""
    # (m - 2**e) / (2**(e + 1) - 2**e), with the denominator 2**e divided out.
    return np.clip(magnitude / BIN - 1.0, 0.0, 1.0)


def _energy_below(magnitude: float) -> FloatArray:
    """Returns, for each bin, the share of its sum of squares in elements below `magnitude`."""
    # The integral of x**2 from 1 to r, over that from 1 to 2.
    return (np.clip(magnitude / BIN, 1.0, 2.0) ** 3 - 1.0) / 7.0


def _noise(limits: Format, scale: float) -> FloatArray:
    """Returns, for each bin, the mean square error of an element that is scaled, rounded, clipped and unscaled."""
    smallest, most = limits.smallest_subnormal / scale, limits.max / scale
    lost, subnormal = _below(smallest / 2), _below(limits.smallest_normal / scale)
    normal = _below(most) - np.minimum(subnormal, _below(most))
    # Rounding to steps of d has a mean square error of d**2 / 12.
    rounding = (subnormal - lost) * smallest**2 / 12 + normal * _step(limits, scale) ** 2 / 12
    start = np.maximum(BIN, most)
    clipped = np.where(2 * BIN > most, ((2 * BIN - most) ** 3 - (start - most) ** 3) / (3 * BIN), 0.0)
    return _energy_below(smallest / 2) * ENERGY + rounding + clipped


def _step(limits: Format, scale: float) -> FloatArray:
    """Returns, for each bin, the root mean square of the distance between two normal numbers, unscaled."""
    # A scale that is no power of two moves a part of each bin into the next, whose steps are twice as wide.
    mantissa = 2 * math.frexp(scale)[0]
    inside = 2 / mantissa - 1
    return BIN * 2.0**-limits.mantissa_bits / mantissa * math.sqrt(inside + 4 * (1 - inside))


def _share(amounts: FloatArray, weights: Any) -> float:
    total = float(amounts.sum())
    return float((amounts * weights).sum()) / total if total else 0.0


def _decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise else math.inf
