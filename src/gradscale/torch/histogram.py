"""Exponent histograms of tensors, wherever they are."""

from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from gradscale.histogram.counts import EXPONENTS, MX_BLOCK, ExponentHistogram, check_block
from gradscale.kernels.torch_exponents import count_blocks, count_exponents
from gradscale.torch.gradients import numbers_of


def exponent_histogram(tensors: Tensor | Iterable[Tensor]) -> ExponentHistogram:
    """Returns the exponent histogram of a tensor, or of several together, in host memory.

    Exactly that of `gradscale.histogram.exponent_histogram`. Reads each tensor once on its device, in chunks, and
    synchronizes with it. Of a sparse tensor the values are counted, of a DTensor the shard of this rank.

    >>> import torch
    >>> histogram = exponent_histogram(torch.tensor([1.0, 1.5, -4.0, 0.0, torch.inf]))
    >>> histogram.highest, histogram.nonzero, int(histogram.zeros), int(histogram.infs)
    (2, 3, 1, 1)

    Raises:
        TypeError: a tensor is not floating-point or complex.
    """
    return _sum_of(tensors, count_exponents)


def block_histogram(tensors: Tensor | Iterable[Tensor], block: int = MX_BLOCK) -> ExponentHistogram:
    """Returns the histogram of the largest magnitude of each block of `block` elements along the last dimension.

    Exactly that of `gradscale.histogram.block_histogram`, where its use is described.

    >>> import torch
    >>> histogram = block_histogram(torch.tensor([[1.0, 8.0, 0.0, 0.0], [0.5, -0.25, 3.0, 0.0]]), block=2)
    >>> histogram.highest, histogram.lowest, histogram.nonzero, int(histogram.zeros)
    (3, -1, 3, 1)

    Raises:
        TypeError: a tensor is not floating-point or complex.
        ValueError: `block` is not positive.
    """
    check_block(block)
    return _sum_of(tensors, lambda tensor: count_blocks(tensor, block))


def _sum_of(tensors: Tensor | Iterable[Tensor], count: Callable[[Tensor], ExponentHistogram]) -> ExponentHistogram:
    total = ExponentHistogram(np.zeros(EXPONENTS.size, np.int64))
    for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
        if not tensor.is_floating_point() and not tensor.is_complex():
            raise TypeError(f"A histogram is of floating-point tensors. Received: one of {tensor.dtype}.")
        total += count(numbers_of(tensor.detach()))
    return total
