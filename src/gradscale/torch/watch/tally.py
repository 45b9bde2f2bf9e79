"""The numbers of one tensor of a model at one step."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradscale.histogram.counts import ExponentHistogram
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
    if scale != 1.0:
        # In float32, where no usual scale makes them subnormal. Exact for a power of two.
        numbers = (numbers.float() if numbers.dtype.itemsize < 4 else numbers) / scale
    return Tally(count_exponents(numbers), _amax(numbers), tensor.dtype, scale)


def _amax(numbers: Tensor) -> float:
    if numbers.dtype.itemsize == 1 or numbers.is_complex() or not numbers.numel():
        return float(largest([numbers.float() if numbers.dtype.itemsize == 1 else numbers], numbers.device))
    lowest, highest = torch.aminmax(numbers)
    below, above = -lowest.item(), highest.item()
    return below if below > above or below != below else above  # NaN where there is one
