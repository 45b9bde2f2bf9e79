"""Counts many tensors by their powers of two, small ones together."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gradscale.formats import FloatArray
from gradscale.histogram.counts import EXPONENTS
from gradscale.kernels.torch import as_real, largest
from gradscale.kernels.torch_exponents import count_exponents
from gradscale.kernels.torch_pieces import MOST, Pieces
from gradscale.torch.step.gradients import numbers_of
from gradscale.watching.counted import Counted, counted_of, unscaling_bits

SMALL = MOST // 2
"""Elements up to which a tensor is copied. For larger ones calls of torch do not matter."""

NOTHING = np.zeros((0, EXPONENTS.size), np.int64), np.zeros((0, 3), np.int64), np.zeros(0)
"""What is counted of no tensor."""


class Staged:
    """Copies of small tensors on an accelerator, which go to the host together.

    Attributes:
        slots: which tensors they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.slots: list[int] = []
        self._ends: list[int] = [0]
        self._numbers = torch.empty(MOST, dtype=torch.float32, device=device)

    def fits(self, size: int) -> bool:
        """Returns whether there is room for so many elements."""
        return self._ends[-1] + size <= MOST

    def put(self, slot: int, numbers: Tensor) -> None:
        """Copies a tensor, which is exact: it is float32 or narrower."""
        start, end = self._ends[-1], self._ends[-1] + numbers.numel()
        self._numbers[start:end].view(numbers.shape).copy_(numbers)
        self.slots.append(slot)
        self._ends.append(end)

    def taken(self) -> list[tuple[int, FloatArray]]:
        """Returns the copies in host memory, and forgets them. Synchronizes with the device."""
        numbers = self._numbers[: self._ends[-1]].cpu().numpy()
        taken = [
            (slot, numbers[start:end]) for slot, (start, end) in zip(self.slots, pairwise(self._ends), strict=True)
        ]
        self.slots, self._ends = [], [0]
        return taken


class Counter:
    """Counts tensors as they are when they are added.

    Small tensors are copied and counted together: a dozen calls of torch for each of them would take longer than
    counting. On an accelerator this also synchronizes once for many of them.

    Args:
        pieces: counts the small ones. It is empty, and may be used again by the next counter.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._slots: list[int] = []
        self._staged: dict[torch.device, Staged] = {}
        self._parts: list[tuple[list[int], FloatArray, FloatArray, FloatArray]] = []
        self._dtypes: list[torch.dtype] = []
        self._scales: list[float] = []
        self._shifts: list[int] = []

    def add(self, tensor: Tensor, scale: float = 1.0) -> int:
        """Returns the position of a tensor, whose numbers divided by `scale` are counted."""
        numbers = tensor.detach()
        if type(numbers) is not Tensor or numbers.layout is not torch.strided:
            numbers = numbers_of(numbers)
        if numbers.is_complex():
            numbers = as_real(numbers)
        slot = len(self._dtypes)
        self._dtypes.append(tensor.dtype)
        self._scales.append(scale)
        bits = 0 if scale == 1.0 else unscaling_bits(scale)
        self._shifts.append(bits or 0)
        if bits is None:
            numbers = (numbers.float() if numbers.dtype.itemsize < 4 else numbers) / scale
        if not 0 < numbers.numel() <= SMALL or numbers.dtype is torch.float64:
            self._parts.append(([slot], *_counted_alone(numbers)))
        elif numbers.is_cpu:
            single = numbers if numbers.dtype is torch.float32 else numbers.float()
            self._add_piece(slot, (single.resolve_neg() if single.is_neg() else single).numpy())
        else:
            self._stage(slot, numbers)
        return slot

    def counted(self) -> Counted:
        """Returns what was counted."""
        for staged in self._staged.values():
            self._take(staged)
        self._flush()
        order = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in self._parts)])
        parts = [NOTHING, *(part[1:] for part in self._parts)]
        bins, outside, amax = (np.concatenate(each) for each in zip(*parts, strict=True))
        rows = np.argsort(order).tolist()
        return counted_of(bins, outside, amax, self._dtypes, self._scales, self._shifts, rows)

    def _add_piece(self, slot: int, numbers: FloatArray) -> None:
        if not self._pieces.fits(numbers.size):
            self._flush()
        self._pieces.add(numbers)
        self._slots.append(slot)

    def _flush(self) -> None:
        if self._slots:
            self._parts.append((self._slots, *self._pieces.counted()))
            self._slots = []

    def _stage(self, slot: int, numbers: Tensor) -> None:
        staged = self._staged.get(numbers.device)
        if staged is None:
            staged = self._staged[numbers.device] = Staged(numbers.device)
        if not staged.fits(numbers.numel()):
            self._take(staged)
        staged.put(slot, numbers)

    def _take(self, staged: Staged) -> None:
        for slot, numbers in staged.taken():
            self._add_piece(slot, numbers)


def _counted_alone(numbers: Tensor) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns what `Pieces` do, of one tensor."""
    found = count_exponents(numbers)
    wide = numbers.float() if numbers.dtype.itemsize == 1 else numbers  # FP8 has no kernel for a maximum
    amax = largest([wide], numbers.device).cpu().numpy()
    return found.host_counts[None], np.array([[found.zeros, found.infs, found.nans]]), amax
