"""Kahan compensation: the rounding error of every weight, in the weight's own dtype."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.contract import MasterStorage
from gradscale.torch.masters.step_buffers import StepBuffer


class Kahan(MasterStorage):
    """Stores the difference between value and weight, rounded to the weight's dtype.

    A value has at least as many bits as two weights together: 16 for BF16, 22 for FP16. What FP16 can store of small
    weights is bounded by its smallest number, 2**-24.
    """

    stored_bytes: ClassVar[int] = 2

    def store(self, weight: Tensor) -> Tensor:
        """Returns zeros: nothing is lost yet."""
        return torch.zeros_like(weight).detach()

    def read(self, weights: Sequence[Tensor], stored: Sequence[Tensor], buffer: StepBuffer) -> Sequence[Tensor]:
        """Returns the sums of weight and error, in `buffer`. They are exact."""
        values = buffer.like(weights)
        for value, weight, error in zip(values, weights, stored, strict=True):
            # Not `weight + error`, which would be rounded to 16 bits: the cast to float32 comes first.
            value.copy_(weight).add_(error)
        return values

    def write(self, values: Sequence[Tensor], weights: Sequence[Tensor], stored: Sequence[Tensor]) -> None:
        """Rounds the values, and stores the rounding errors."""
        for value, weight, error in zip(values, weights, stored, strict=True):
            weight.copy_(value)
            wide = weight.float()
            # Beside a weight that is inf or NaN the difference is not finite, and nothing could be recovered from it.
            error.copy_((value - wide).nan_to_num_(0.0, 0.0, 0.0))
            # The error may itself be rounded up to half a unit of the weight. Their sum would then round to another
            # weight, and writing back what was read would change it. The next error towards zero does not do so; its
            # bits are one less, for either sign.
            rounds_away = wide.add_(error).to(weight.dtype) != weight
            error.view(torch.int16).sub_(rounds_away.to(torch.int16))
