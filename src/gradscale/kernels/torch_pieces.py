"""Exponent histograms of many small arrays, in one call of `bincount` for all of them."""

from itertools import accumulate, pairwise

import numpy as np
import torch

from gradscale.formats import FloatArray
from gradscale.histogram.counts import EXPONENTS, LOWEST_EXPONENT
from gradscale.kernels.torch_exponents import SINGLE, folded

MOST = 524_288
"""Elements that are counted together. They stay in the processor's last cache until they are counted."""

MAGNITUDE = np.int32(torch.iinfo(SINGLE.integer).max)
"""The bits of a number without its sign. As integers they have the order of the magnitudes, NaN above inf."""

MANTISSA_BITS = np.int32(SINGLE.mantissa_bits)


class Pieces:
    """Small float32 arrays, kept without their signs until they are counted.

    numpy's calls on small arrays take half the time of torch's, and torch's `bincount` half the time of numpy's.
    """

    def __init__(self) -> None:
        self._magnitudes = np.empty(MOST, np.int32)
        self._fields = torch.empty(MOST, dtype=torch.int32, device="cpu")
        self._fields_array = self._fields.numpy()
        self._sizes: list[int] = []
        self._used = 0

    def fits(self, size: int) -> bool:
        """Returns whether there is room for so many elements."""
        return self._used + size <= MOST

    def add(self, numbers: FloatArray) -> None:
        """Keeps the numbers of a float32 array of any layout, which is not empty."""
        # One pass for each array. The others are made over all of them together, in fewer calls.
        start, end = self._used, self._used + numbers.size
        magnitudes = self._magnitudes[start:end]
        np.bitwise_and(numbers.view(np.int32), MAGNITUDE, magnitudes.reshape(numbers.shape))
        self._sizes.append(end - start)
        self._used = end

    def counted(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns the bins, the zeros, infs and NaNs, and the largest magnitudes, in rows; and forgets the arrays.

        NaN is the largest where there is one. Exactly what `count_exponents` and a maximum give for each array.
        """
        rows = len(self._sizes)
        starts = [0, *accumulate(self._sizes)]
        magnitudes, fields = self._magnitudes[: self._used], self._fields_array[: self._used]
        np.right_shift(magnitudes, MANTISSA_BITS, fields)
        for row, (start, end) in enumerate(pairwise(starts)):
            part = fields[start:end]
            np.add(part, np.int32(row << SINGLE.exponent_bits), part)  # each array has fields of its own
        counts = (
            torch.bincount(self._fields[: self._used], minlength=rows << SINGLE.exponent_bits).numpy().reshape(rows, -1)
        )
        bins = np.zeros((rows, EXPONENTS.size), np.int64)
        bins[:, 1 - SINGLE.bias - LOWEST_EXPONENT :] = counts[:, 1 : SINGLE.last]
        outside = np.zeros((rows, 3), np.int64)
        outside[:, 0] = counts[:, 0]
        # Arrays with inf, NaN or subnormal numbers, which share a field with others, are few and counted one by one.
        special = counts[:, -1] > 0
        if (small := counts[:, 0].sum()) and magnitudes.size - np.count_nonzero(magnitudes) < small:
            special |= counts[:, 0] > 0
        for row in np.flatnonzero(special):
            found = folded(counts[row], torch.from_numpy(magnitudes[starts[row] : starts[row + 1]]), SINGLE)
            bins[row], outside[row] = found.counts, (found.zeros, found.infs, found.nans)
        amax = np.maximum.reduceat(magnitudes, starts[:-1]).view(np.float32)
        self._sizes, self._used = [], 0
        return bins, outside, amax
