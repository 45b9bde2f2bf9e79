"""Exponent histograms of torch tensors, by the bits of their numbers, in chunks."""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscale.formats import FloatArray
from gradscale.histogram.counts import EXPONENTS, HIGHEST_EXPONENT, LOWEST_EXPONENT, ExponentHistogram
from gradscale.kernels.torch import as_real, largest
from gradscale.watching.rows import Tally

CHUNK = 262_144
"""Elements that are counted together: with fewer, calls of torch cost more than counting."""


class Layout(NamedTuple):
    """How the bits of a floating-point type are laid out.

    Attributes:
        integer: the integer type of the same size.
        mantissa_bits: explicit bits of the mantissa. Above it are the field of the exponent and the sign.
        last: the highest value of that field: that of inf and NaN. Half of it is the exponent 0.
    """

    integer: torch.dtype
    mantissa_bits: int
    last: int


SINGLE = Layout(torch.int32, 23, 255)
DOUBLE = Layout(torch.int64, 52, 2047)


@torch.no_grad()
def count_exponents(tensor: Tensor) -> ExponentHistogram:
    """Returns elements by exponent; zeros, infs and NaNs.

    Narrow types are cast to float32 chunk by chunk, which is exact. A complex tensor counts as its two parts. Reads the
    tensor once and makes no temporary larger than a chunk. On an accelerator it synchronizes once for each chunk.
    """
    return _total(_bits(piece.reshape(-1)) for piece in _pieces(_real(tensor), 1))


@torch.no_grad()
def count_blocks(tensor: Tensor, block: int) -> ExponentHistogram:
    """Returns the same for the largest magnitude of each block of `block` elements along the last dimension."""
    return _total(peak for piece in _pieces(_real(tensor), block) for peak in _block_peaks(piece, block))


@torch.no_grad()
def tally(tensor: Tensor, scale: float = 1.0) -> Tally:
    """Returns the numbers of a dense tensor divided by `scale`. Narrow types are divided in float32."""
    real = as_real(tensor) if tensor.is_complex() else tensor
    wide = real.float() if real.dtype.itemsize == 1 or (scale != 1.0 and real.dtype.itemsize < 4) else real
    numbers = wide if scale == 1.0 else wide / scale
    return Tally(count_exponents(numbers), float(largest([numbers], numbers.device)[0]), tensor.dtype, scale)


def _real(tensor: Tensor) -> Tensor:
    # The parts of a complex tensor are put in front, so that the last dimension is its own.
    real = as_real(tensor).movedim(-1, 0) if tensor.is_complex() else tensor
    return real.reshape(1) if real.dim() == 0 else real


def _total(chunks: Iterable[Tensor]) -> ExponentHistogram:
    return reduce(
        ExponentHistogram.__add__, map(_counted, chunks), ExponentHistogram(np.zeros(EXPONENTS.size, np.int64))
    )


def _counted(bits: Tensor) -> ExponentHistogram:
    """Returns the histogram of a chunk."""
    layout = DOUBLE if bits.dtype is DOUBLE.integer else SINGLE
    shifted = bits >> layout.mantissa_bits
    # A byte holds the 8 bits of float32's field and drops the sign above. `bincount` is faster on bytes.
    own = shifted.to(torch.uint8) if layout is SINGLE else shifted & layout.last
    fields = torch.bincount(own, minlength=layout.last + 1).cpu().numpy()
    total = np.zeros(EXPONENTS.size, np.int64)
    _add_to_bins(total, np.arange(1, layout.last) - layout.last // 2, fields[1:-1])
    zeros = infs = 0
    if fields[0]:
        zeros = bits.numel() - int(torch.count_nonzero(bits << 1))  # shifted by the sign
        if fields[0] > zeros:
            # The mantissa of a subnormal number, as an integer, is a whole number of the smallest ones.
            whole = bits[own == 0].bitwise_and_(2**layout.mantissa_bits - 1).cpu().numpy()
            exponents = np.frexp(whole[whole > 0].astype(np.float64))[1] - layout.last // 2 - layout.mantissa_bits
            _add_to_bins(total, exponents, 1)
    if fields[-1]:
        infs = int(((bits & torch.iinfo(bits.dtype).max) == layout.last << layout.mantissa_bits).sum())
    return ExponentHistogram(total, np.int64(zeros), np.int64(infs), np.int64(fields[-1] - infs))


def _add_to_bins(total: FloatArray, exponents: FloatArray, counts: Any) -> None:
    """Adds counts of numbers with these exponents; those beyond the bins go to the first and the last."""
    np.add.at(total, np.clip(exponents, LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT, counts)


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
