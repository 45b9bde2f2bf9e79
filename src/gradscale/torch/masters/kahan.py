"""Kahan compensation: the rounding error of every weight, in the weight's own dtype."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.contract import MasterStorage
from gradscale.torch.masters.step_buffers import StepBuffer


class Kahan(MasterStorage):
    """Stores what the weight exceeds the value by, rounded to the weight's dtype.

    A value has at least as many bits as two weights together: 16 for BF16, 22 for FP16. What FP16 can store of small
    weights is bounded by its smallest number, 2**-24.
    """

    # Weight minus value, not the reverse: -0.0 - 0.0 is -0.0, and -0.0 + 0.0 is 0.0. A step that only the device knows
    # to be skipped would change the sign of a weight of -0.0.

    stored_bytes: ClassVar[int] = 2

    def store(self, weight: Tensor) -> Tensor:
        """Returns zeros: nothing is lost yet."""
        return torch.zeros_like(weight).detach()

    def read(self, weights: Sequence[Tensor], stored: Sequence[Tensor], buffer: StepBuffer) -> Sequence[Tensor]:
        """Returns weight minus error, in `buffer`. The differences are exact."""
        values = buffer.like(weights)
        for value, weight, error in zip(values, weights, stored, strict=True):
            # Not `weight - error`, which would be rounded to 16 bits: the cast to float32 comes first.
            value.copy_(weight).sub_(error)
        return values

    def write(
        self,
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
        stored: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        """Rounds the values, and stores the rounding errors."""
        del parameters
        for value, weight, error in zip(values, weights, stored, strict=True):
            weight.copy_(value)
            wide = weight.float()
            # Beside a weight that is inf or NaN the difference is not finite, and nothing could be recovered from it.
            error.copy_((wide - value).nan_to_num_(0.0, 0.0, 0.0))
            # The error may itself be rounded up to half a unit of the weight. The value would then round to another
            # weight, and writing back what was read would change it. The next error towards zero does not do so; its
            # bits are one less, for either sign.
            rounds_away = wide.sub_(error).to(weight.dtype) != weight
            error.view(torch.int16).sub_(rounds_away.to(torch.int16))
