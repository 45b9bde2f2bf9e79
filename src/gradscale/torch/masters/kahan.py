"""Kahan compensation: what the rounding of a weight lost, in the weight's own type."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.scratch import Scratch
from gradscale.torch.masters.way import Stateless, refined


class Kahan(Stateless):
    """Keeps the difference between value and weight, rounded to the weight's type.

    The value has at least as many bits as two weights one after the other: 16 for BF16, 22 for FP16. The smallest FP16
    number, 2**-24, bounds what FP16 can keep of small weights.
    """

    kept_bytes: ClassVar[int] = 2
    holds_values: ClassVar[bool] = False

    def keep(self, weight: Tensor) -> Tensor:
        """Returns zeros: nothing is lost yet."""
        return torch.zeros_like(weight).detach()

    def read(self, weights: Sequence[Tensor], kept: Sequence[Tensor], scratch: Scratch) -> Sequence[Tensor]:
        """Returns the sums, made in `scratch`. They are exact."""
        values = scratch.like(weights)
        for value, weight, lost in zip(values, weights, kept, strict=True):
            value.copy_(weight).add_(lost)
        return values

    def write(self, values: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Rounds the values, and keeps what that lost."""
        for value, weight, lost in zip(values, weights, kept, strict=True):
            weight.copy_(value)
            wide = weight.float()
            # Nothing is lost that could come back once a weight is inf.
            lost.copy_((value - wide).nan_to_num_(0.0, 0.0, 0.0))
            # Rounded up to half a unit of the weight, it would carry the weight to its neighbour when read.
            carries = wide.add_(lost).to(weight.dtype) != weight
            lost.view(torch.int16).sub_(carries.to(torch.int16))

    def adopt(self, weight: Tensor, kept: Tensor) -> None:
        """Forgets what was lost: it is not known which weights are still the same."""
        del weight
        kept.zero_()

    def restore(self, value: Tensor, weight: Tensor, kept: Tensor) -> None:
        """Takes over saved values wherever the weight is what they round to."""
        self.write([refined(weight, value)], [weight], [kept])
