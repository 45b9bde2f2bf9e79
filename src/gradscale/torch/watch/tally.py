"""The numbers of one tensor of a model at one step."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradscale.histogram.counts import ExponentHistogram, shifted
from gradscale.kernels.torch import largest
from gradscale.kernels.torch_exponents import count_exponents
from gradscale.torch.step.gradients import numbers_of

Kind = Literal["weight", "input", "output", "output_grad", "weight_grad"]

Key = tuple[str, Kind]
"""Name of a module or a parameter, and what was recorded of it."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The numbers of one tensor of a model, of all forward and backward passes of a step together.

    Attributes:
        histogram: the numbers; gradients are unscaled.
        amax: the largest magnitude; NaN where there is one.
        dtype: the type that the tensor had.
        scale: what gradients were multiplied by when they were recorded; 1 for other tensors.
    """

    histogram: ExponentHistogram
    amax: float
    dtype: torch.dtype
    scale: float

    def __add__(self, other: "Tally") -> "Tally":
        """Returns both together. The type and the scale are those of the latter."""
        amax = math.nan if math.isnan(self.amax + other.amax) else max(self.amax, other.amax)
        return Tally(self.histogram + other.histogram, amax, other.dtype, other.scale)


def tally_of(tensor: Tensor, scale: float = 1.0) -> Tally:
    """Returns the numbers of a tensor, divided by `scale`. Synchronizes with its device."""
    numbers = numbers_of(tensor.detach())
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5:
        # A power of two moves every number by the same number of bins, and no temporary is needed.
        return Tally(shifted(count_exponents(numbers), 1 - exponent), _amax(numbers) / scale, tensor.dtype, scale)
    unscaled = (numbers.float() if numbers.dtype.itemsize < 4 else numbers) / scale
    return Tally(count_exponents(unscaled), _amax(unscaled), tensor.dtype, scale)


def _amax(numbers: Tensor) -> float:
    if numbers.dtype.itemsize == 1 or numbers.is_complex() or not numbers.numel():
        return float(largest([numbers.float() if numbers.dtype.itemsize == 1 else numbers], numbers.device))
    lowest, highest = torch.aminmax(numbers)
    below, above = -lowest.item(), highest.item()
    return below if below > above or below != below else above  # NaN where there is one
