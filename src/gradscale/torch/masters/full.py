"""Full masters: a float32 copy of every weight."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradscale.torch.masters.scratch import Scratch
from gradscale.torch.masters.way import Stateless, refined


class Full(Stateless):
    """Keeps the float32 value. The weight is that value, rounded to nearest, ties to even."""

    kept_bytes: ClassVar[int] = 4
    holds_values: ClassVar[bool] = True

    def keep(self, weight: Tensor) -> Tensor:
        """Returns the weight in float32."""
        return nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad)

    def read(self, weights: Sequence[Tensor], kept: Sequence[Tensor], scratch: Scratch) -> Sequence[Tensor]:
        """Returns what is kept: no copy."""
        del weights, scratch
        return kept

    def write(self, values: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Rounds the values into the weights: one multi-tensor kernel."""
        del kept
        torch._foreach_copy_(list(weights), list(values))  # pyright: ignore[reportPrivateImportUsage]

    def adopt(self, weight: Tensor, kept: Tensor) -> None:
        """Takes the weight over wherever it is not what the kept value rounds to.

        So weights that were swapped for an average and back again have lost nothing.
        """
        kept.copy_(refined(weight, kept))

    def restore(self, value: Tensor, weight: Tensor, kept: Tensor) -> None:
        """Takes over saved values wherever the weight is what they round to."""
        kept.copy_(refined(weight, value))
