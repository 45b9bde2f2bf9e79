"""Counts of many tensors, each by itself: of the small ones in one call of `bincount` for all of them."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gradscale.histogram.counts import EXPONENTS, LOWEST_EXPONENT
from gradscale.kernels.torch import as_real, largest
from gradscale.kernels.torch_exponents import SINGLE, count_exponents, folded
from gradscale.watching.sample import Counts

MOST = 524_288
"""Elements that are counted together. They stay in the processor's last cache until they are counted."""

SMALL = MOST // 2
"""Elements up to which a tensor is copied. For larger ones calls of torch do not matter."""

MAGNITUDE = np.int32(torch.iinfo(SINGLE.integer).max)
"""The bits of a number without its sign. As integers they have the order of the magnitudes, NaN above inf."""


class Counter:
    """Counts tensors as they are when they are added.

    Small tensors are copied and counted together: a dozen calls of torch for each of them would take longer than
    counting. On an accelerator this also synchronizes once for many of them.
    """

    def __init__(self) -> None:
        self._pieces: dict[torch.device, Pieces] = {}
        # By position: bins, numbers outside of them and the largest.
        self._found: dict[int, Counts] = {}
        self._added = 0

    @torch.no_grad()
    def add(self, tensor: Tensor, scale: float = 1.0) -> None:
        """Counts the numbers of a dense tensor divided by `scale`."""
        numbers = as_real(tensor) if tensor.is_complex() else tensor
        if scale != 1.0:
            numbers = (numbers.float() if numbers.dtype.itemsize < 4 else numbers) / scale
        if 0 < numbers.numel() <= SMALL and numbers.dtype is not torch.float64:
            if numbers.device not in self._pieces:
                self._pieces[numbers.device] = Pieces(numbers.device)
            pieces = self._pieces[numbers.device]
            if not pieces.fits(numbers.numel()):
                self._found.update(pieces.counted())
            pieces.add(self._added, numbers)
        else:
            found = count_exponents(numbers)
            wide = numbers.float() if numbers.dtype.itemsize == 1 else numbers  # FP8 has no kernel for a maximum
            amax = largest([wide], wide.device).cpu().numpy()[0]
            outside = np.array([found.zeros, found.infs, found.nans])
            self._found[self._added] = Counts(found.host_counts, outside, amax)
        self._added += 1

    def counts(self) -> Counts:
        """Returns what was counted, in the order in which the tensors were added."""
        for pieces in self._pieces.values():
            self._found.update(pieces.counted())
        bins, outside, amax = (np.array([self._found[row][part] for row in range(self._added)]) for part in range(3))
        return Counts(bins.reshape(-1, EXPONENTS.size), outside, amax)


class Pieces:
    """Copies of small tensors on a device, which go to the host together."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.empty(MOST, dtype=torch.float32, device=device)
        self._ends = [0]
        self._positions: list[int] = []

    def fits(self, size: int) -> bool:
        """Returns whether there is room for so many elements."""
        return self._ends[-1] + size <= MOST

    def add(self, position: int, numbers: Tensor) -> None:
        """Copies a tensor of any layout, which is not empty. That is exact: it is float32 or narrower."""
        start, end = self._ends[-1], self._ends[-1] + numbers.numel()
        self._numbers[start:end].view(numbers.shape).copy_(numbers)
        self._ends.append(end)
        self._positions.append(position)

    def counted(self) -> Iterator[tuple[int, Counts]]:
        """Yields each position and what was counted of its tensor; then forgets the tensors.

        NaN is the largest where there is one. Exactly what `count_exponents` and a maximum give for each tensor.
        Synchronizes with the device.
        """
        if not self._positions:
            return
        rows, ends = len(self._positions), self._ends
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
        yield from zip(self._positions, map(Counts, bins, outside, amax), strict=True)
        self._ends, self._positions = [0], []
