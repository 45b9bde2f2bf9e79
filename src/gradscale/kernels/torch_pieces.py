"""Exponent histograms of many small tensors, in one call of `bincount` for all of them."""

import numpy as np
import torch
from torch import Tensor

from gradscale.formats import FloatArray
from gradscale.histogram.counts import EXPONENTS, LOWEST_EXPONENT
from gradscale.kernels.torch_exponents import SINGLE, folded

MOST = 524_288
"""Elements that are counted together. They stay in the processor's last cache until they are counted."""

MAGNITUDE = np.int32(torch.iinfo(SINGLE.integer).max)
"""The bits of a number without its sign. As integers they have the order of the magnitudes, NaN above inf."""


class Pieces:
    """Copies of small tensors on a device, which go to the host together."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.empty(MOST, dtype=torch.float32, device=device)
        self._ends = [0]

    def fits(self, size: int) -> bool:
        """Returns whether there is room for so many elements."""
        return self._ends[-1] + size <= MOST

    def add(self, numbers: Tensor) -> None:
        """Copies a tensor of any layout, which is not empty. That is exact: it is float32 or narrower."""
        start, end = self._ends[-1], self._ends[-1] + numbers.numel()
        self._numbers[start:end].view(numbers.shape).copy_(numbers)
        self._ends.append(end)

    def counted(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns the bins, the zeros, infs and NaNs, and the largest magnitudes, in rows; and forgets the tensors.

        NaN is the largest where there is one. Exactly what `count_exponents` and a maximum give for each tensor.
        Synchronizes with the device.
        """
        rows, ends = len(self._ends) - 1, self._ends
        magnitudes = self._numbers[: ends[-1]].cpu().numpy().view(np.int32) & MAGNITUDE
        # Each tensor has fields of its own.
        fields = (magnitudes >> SINGLE.mantissa_bits) + np.repeat(
            np.arange(rows, dtype=np.int32) << SINGLE.exponent_bits, np.diff(ends)
        )
        # torch's `bincount` takes half the time of numpy's.
        counts = torch.bincount(torch.from_numpy(fields), minlength=rows << SINGLE.exponent_bits).numpy()
        counts = counts.reshape(rows, -1)
        bins = np.zeros((rows, EXPONENTS.size), np.int64)
        bins[:, 1 - SINGLE.bias - LOWEST_EXPONENT :] = counts[:, 1 : SINGLE.last]
        outside = np.zeros((rows, 3), np.int64)
        outside[:, 0] = counts[:, 0]
        # Tensors with inf, NaN or subnormal numbers, which share a field with others, are few and counted one by one.
        special = counts[:, -1] > 0
        if (small := counts[:, 0].sum()) and magnitudes.size - np.count_nonzero(magnitudes) < small:
            special |= counts[:, 0] > 0
        for row in np.flatnonzero(special):
            found = folded(counts[row], torch.from_numpy(magnitudes[ends[row] : ends[row + 1]]), SINGLE)
            bins[row], outside[row] = found.counts, (found.zeros, found.infs, found.nans)
        amax = np.maximum.reduceat(magnitudes, ends[:-1]).view(np.float32)
        self._ends = [0]
        return bins, outside, amax
