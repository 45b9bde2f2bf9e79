"""Exponent histograms of torch tensors, by the bits of their numbers, in chunks."""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscale.formats import FloatArray
from gradscale.histogram.counts import EXPONENTS, HIGHEST_EXPONENT, LOWEST_EXPONENT, ExponentHistogram
from gradscale.kernels.torch import as_real

CHUNK = 262_144
"""Elements that are counted together: with fewer, calls of torch cost more than counting."""


class Layout(NamedTuple):
    """How the bits of a floating-point type are laid out.

    Attributes:
        integer: the integer type of the same size.
        mantissa_bits: explicit bits of the mantissa. Above it are the field of the exponent and the sign.
        exponent_bits: bits of the exponent's field.
    """

    integer: torch.dtype
    mantissa_bits: int
    exponent_bits: int

    @property
    def bias(self) -> int:
        """The field of the exponent 0."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def last(self) -> int:
        """The highest field: that of inf and NaN."""
        return 2**self.exponent_bits - 1

    @property
    def inf(self) -> int:
        """The bits of inf."""
        return self.last << self.mantissa_bits


SINGLE = Layout(torch.int32, 23, 8)
DOUBLE = Layout(torch.int64, 52, 11)


@torch.no_grad()
def count_exponents(tensor: Tensor) -> ExponentHistogram:
    """Returns elements by exponent; zeros, infs and NaNs.

    Narrow types are cast to float32 chunk by chunk, which is exact. A complex tensor counts as its two parts. Reads the
    tensor once and makes no temporary larger than a chunk. On an accelerator it synchronizes once for each chunk.
    """
    real = _real(tensor)
    return _total((_bits(piece.reshape(-1)) for piece in _pieces(real, 1)), real)


@torch.no_grad()
def count_blocks(tensor: Tensor, block: int) -> ExponentHistogram:
    """Returns the same for the largest magnitude of each block of `block` elements along the last dimension."""
    real = _real(tensor)
    return _total((peak for piece in _pieces(real, block) for peak in _block_peaks(piece, block)), real)


def _real(tensor: Tensor) -> Tensor:
    # The parts of a complex tensor are put in front, so that the last dimension is its own.
    real = as_real(tensor).movedim(-1, 0) if tensor.is_complex() else tensor
    return real.reshape(1) if real.dim() == 0 else real


def _total(chunks: Iterable[Tensor], tensor: Tensor) -> ExponentHistogram:
    layout = DOUBLE if tensor.dtype is torch.float64 else SINGLE
    histograms = [folded(_field_counts(bits, layout), bits, layout) for bits in chunks]
    return reduce(ExponentHistogram.__add__, histograms or [ExponentHistogram(np.zeros(EXPONENTS.size, np.int64))])


def folded(fields: FloatArray, bits: Tensor, layout: Layout) -> ExponentHistogram:
    """Returns the histogram of a chunk, by the counts of its fields."""
    total = np.zeros(EXPONENTS.size, np.int64)
    zeros = infs = 0
    _add_to_bins(total, fields[1 : layout.last], 1 - layout.bias)
    if fields[0]:
        zeros = bits.numel() - int(torch.count_nonzero(bits << 1))  # shifted by the sign
        if fields[0] > zeros:
            _add_subnormal(total, bits, layout)
    if fields[-1]:
        infs = int(((bits & torch.iinfo(layout.integer).max) == layout.inf).sum())
    return ExponentHistogram(total, np.int64(zeros), np.int64(infs), np.int64(fields[-1] - infs))


def _pieces(tensor: Tensor, block: int) -> Iterator[Tensor]:
    """Yields views of at most a chunk that together are the tensor, and cut no block of `block` elements in two."""
    if tensor.numel() <= max(CHUNK, block):
        yield tensor
        return
    if block == 1 and tensor.is_contiguous():
        yield from tensor.view(-1).split(CHUNK)
        return
    rows = tensor.shape[:-1]
    if max(rows, default=1) > 1:
        along = max(range(len(rows)), key=lambda dim: rows[dim])
        half = (rows[along] + 1) // 2
    else:
        along, half = tensor.dim() - 1, max(1, tensor.shape[-1] // 2 // block) * block
    for part in tensor.split([half, tensor.shape[along] - half], along):
        yield from _pieces(part, block)


def _bits(piece: Tensor) -> Tensor:
    if piece.dtype is torch.float64:
        return piece.contiguous().view(DOUBLE.integer)
    return piece.float().contiguous().view(SINGLE.integer)


def _block_peaks(piece: Tensor, block: int) -> Iterator[Tensor]:
    """Yields the bits of the largest magnitude of each block: of whole blocks, and of what is left of each row."""
    # Without the sign, bits as integers have the order of the magnitudes, NaN above inf.
    bits = _bits(piece)
    magnitudes = bits & torch.iinfo(bits.dtype).max
    whole = piece.shape[-1] // block * block
    if whole and piece.numel():
        yield magnitudes[..., :whole].unflatten(-1, (-1, block)).amax(-1).reshape(-1)
    if whole < piece.shape[-1] and piece.numel():
        yield magnitudes[..., whole:].amax(-1).reshape(-1)


def _field_counts(bits: Tensor, layout: Layout) -> FloatArray:
    """Returns how many numbers have each value in the field of their exponent."""
    shifted = bits >> layout.mantissa_bits
    # A byte holds the 8 bits of float32's field and drops the sign above. `bincount` is faster on bytes.
    fields = shifted.to(torch.uint8) if layout.exponent_bits == 8 else shifted & layout.last
    return torch.bincount(fields, minlength=layout.last + 1).cpu().numpy()


def _add_subnormal(total: FloatArray, bits: Tensor, layout: Layout) -> None:
    """Adds the subnormal numbers of a chunk."""
    small = bits[((bits >> layout.mantissa_bits) & layout.last) == 0] & (2**layout.mantissa_bits - 1)
    # The mantissa of a subnormal number, as an integer, is a whole number of the smallest ones. As a float32 it is
    # normal, and its exponent counts from that of the smallest. Beyond 24 bits it may round up, but those of float64
    # are all below the first bin.
    fields = _field_counts(small.to(torch.float32).view(SINGLE.integer), SINGLE)
    lowest = 1 - layout.bias - layout.mantissa_bits
    _add_to_bins(total, fields[SINGLE.bias : SINGLE.bias + layout.mantissa_bits + 1], lowest)


def _add_to_bins(total: FloatArray, counts: FloatArray, first: int) -> None:
    """Adds counts of consecutive exponents from `first` on; those beyond the bins go to the first and the last."""
    below = min(max(0, LOWEST_EXPONENT - first), len(counts))
    above = max(0, first + len(counts) - 1 - HIGHEST_EXPONENT)
    inside = counts[below : len(counts) - above]
    start = first + below - LOWEST_EXPONENT
    total[start : start + len(inside)] += inside
    if below or above:
        total[0] += counts[:below].sum()
        total[-1] += counts[len(counts) - above :].sum()
