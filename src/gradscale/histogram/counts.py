"""Exponent histograms of arrays, and of the largest magnitudes of their blocks."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from gradscale._chunks import CHUNK, chunks, parts
from gradscale.formats import FP32, FloatArray
from gradscale.record import Array, Record, leaf

LOWEST_EXPONENT = math.frexp(FP32.smallest_subnormal)[1] - 1
HIGHEST_EXPONENT = math.frexp(FP32.max)[1] - 1
"""Range of the bins: the exponents of float32. Float64 values beyond are counted in the first and the last bin."""

EXPONENTS = np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
"""Exponent of each bin: bin e counts the magnitudes from 2**e up to, but not including, 2**(e + 1)."""

MX_BLOCK = 32
"""Elements that share a scale in the MX formats (OCP Microscaling, 1.0). In NVFP4 it is 16."""


@dataclass(frozen=True, slots=True, eq=False)
class ExponentHistogram(Record):
    """How many elements lie in each power of two.

    Attributes:
        counts: elements in each bin of `EXPONENTS`.
        zeros: elements that are zero.
        infs: elements that are inf or -inf.
        nans: elements that are NaN.
    """

    counts: Array = leaf("int64")
    zeros: Array = leaf("int64", 0)
    infs: Array = leaf("int64", 0)
    nans: Array = leaf("int64", 0)

    def __post_init__(self) -> None:
        # JAX builds it with placeholders, which have no shape, and with histograms stacked by `vmap` and `scan`.
        if (shape := getattr(self.counts, "shape", EXPONENTS.shape))[-1:] != EXPONENTS.shape:
            raise ValueError(
                f"`counts` must have one number for each of the {EXPONENTS.size} bins. Received: shape {tuple(shape)}."
            )

    def __add__(self, other: "ExponentHistogram") -> "ExponentHistogram":
        """Returns the histogram of both sets of elements together."""
        return ExponentHistogram(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def nonfinite(self) -> Array:
        """Elements that are inf or NaN."""
        return self.infs + self.nans

    @property
    def nonzero(self) -> int:
        """Elements in the bins: neither zero, nor inf, nor NaN."""
        return int(self.host_counts.sum())

    @property
    def highest(self) -> int:
        """Exponent of the highest bin that is not empty.

        Raises:
            ValueError: every bin is empty.
        """
        return int(EXPONENTS[self._occupied()[-1]])

    @property
    def lowest(self) -> int:
        """Exponent of the lowest bin that is not empty.

        Raises:
            ValueError: every bin is empty.
        """
        return int(EXPONENTS[self._occupied()[0]])

    @property
    def host_counts(self) -> FloatArray:
        """The counts as a numpy array of int64. Synchronizes with their device, if they are on one."""
        return np.asarray(self.counts).astype(np.int64)

    def _occupied(self) -> FloatArray:
        occupied = np.flatnonzero(self.host_counts)
        if not occupied.size:
            raise ValueError("The histogram must hold an element that is not zero. Received: none.")
        return occupied


def exponent_histogram(arrays: FloatArray | Iterable[FloatArray]) -> ExponentHistogram:
    """Returns the exponent histogram of an array, or of several together.

    Reads each array once, in chunks. A complex array counts as its real and imaginary parts.

    >>> histogram = exponent_histogram(np.float16([1.0, 1.5, -4.0, 0.0, np.inf]))
    >>> histogram.highest, histogram.nonzero, int(histogram.zeros), int(histogram.infs)
    (2, 3, 1, 1)
    """
    return _sum_of(arrays, chunks)


def block_histogram(arrays: FloatArray | Iterable[FloatArray], block: int = MX_BLOCK) -> ExponentHistogram:
    """Returns the histogram of the largest magnitude of each block of `block` elements along the last dimension.

    The formats with a scale for each block take it from that magnitude: MX formats for blocks of 32, NVFP4 for 16. The
    last block of a row may be shorter. `zeros` counts the blocks that are all zero, whose scale must not be computed as
    a quotient; a block with a NaN counts in `nans`, else one with an inf in `infs`.

    >>> histogram = block_histogram(np.float32([[1.0, 8.0, 0.0, 0.0], [0.5, -0.25, 3.0, 0.0]]), block=2)
    >>> histogram.highest, histogram.lowest, histogram.nonzero, int(histogram.zeros)
    (3, -1, 3, 1)

    Raises:
        ValueError: `block` is not positive.
    """
    check_block(block)
    return _sum_of(arrays, lambda array: _block_peaks(array, block))


def check_block(block: int) -> None:
    """Raises ValueError unless `block` is a number of elements."""
    if not isinstance(block, int) or block < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"`block` must be a positive number of elements. Received: block={block!r}.")


def _sum_of(
    arrays: FloatArray | Iterable[FloatArray], pieces: Callable[[FloatArray], Iterator[FloatArray]]
) -> ExponentHistogram:
    several = cast(Iterable[FloatArray], (arrays,) if isinstance(arrays, np.ndarray) else arrays)
    total = ExponentHistogram(np.zeros(EXPONENTS.size, np.int64))
    with np.errstate(invalid="ignore"):
        for array in several:
            for chunk in pieces(array):
                total = total + _counted(chunk)
    return total


def _block_peaks(array: FloatArray, block: int) -> Iterator[FloatArray]:
    """Yields the largest magnitudes of the blocks, in chunks. NaN where a block has one."""
    for part in map(np.atleast_2d, parts(array)):
        width = part.shape[-1]
        along = max(1, CHUNK // block) * block
        together = max(1, CHUNK // max(1, width))
        for begin in range(0, math.prod(part.shape[:-1]), together):
            picked = range(begin, min(begin + together, math.prod(part.shape[:-1])))
            rows: Any = part[np.unravel_index(picked, part.shape[:-1])]  # a copy of them, of any layout
            for start in range(0, width, along):
                magnitudes = np.abs(rows[:, start : start + along].astype(np.float64))
                yield np.maximum.reduceat(magnitudes, range(0, magnitudes.shape[1], block), axis=1).ravel()


def _counted(chunk: FloatArray) -> ExponentHistogram:
    finite = chunk[np.isfinite(chunk)]
    nonzero = finite[finite != 0]
    # frexp's mantissa lies between 1/2 and 1, so its exponent is one above that of the leading bit.
    exponents = np.clip(np.frexp(nonzero)[1] - 1, LOWEST_EXPONENT, HIGHEST_EXPONENT)
    counts = np.bincount(exponents - LOWEST_EXPONENT, minlength=EXPONENTS.size)
    nans = np.count_nonzero(np.isnan(chunk))
    return ExponentHistogram(
        counts,
        zeros=np.int64(finite.size - nonzero.size),
        infs=np.int64(chunk.size - finite.size - nans),
        nans=np.int64(nans),
    )
