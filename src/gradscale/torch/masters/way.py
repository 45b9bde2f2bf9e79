"""What every way to keep the low bits of a 16-bit weight can do."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gradscale.torch.masters.scratch import Scratch


class Way(Protocol):
    """Makes float32 values of 16-bit weights and what is kept beside them, and writes them back.

    Attributes:
        kept_bytes: bytes kept beside each element of a weight.
        holds_values: whether what is kept are the float32 values themselves, and not something to make them from.
    """

    kept_bytes: ClassVar[int]
    holds_values: ClassVar[bool]

    def keep(self, weight: Tensor) -> Tensor:
        """Returns what to keep beside a weight whose value is exact."""
        ...

    def read(self, weights: Sequence[Tensor], kept: Sequence[Tensor], scratch: Scratch) -> Sequence[Tensor]:
        """Returns the float32 values. They are good until `scratch` is used again."""
        ...

    def write(self, values: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Rounds the values into the weights, and what the rounding lost into what is kept.

        Values that `read` returned, written back as they are, change nothing: a step that a kernel skipped, unknown to
        the host, leaves no trace.
        """
        ...

    def adopt(self, weight: Tensor, kept: Tensor) -> None:
        """Makes what is kept fit a weight that somebody else has written to."""
        ...

    def restore(self, value: Tensor, weight: Tensor, kept: Tensor) -> None:
        """Takes over saved values wherever the weight is what they round to. The weight says what is true elsewhere."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns what else it takes to go on bit for bit."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned."""
        ...


class Stateless:
    """A way that knows nothing but the weights and what is kept beside them."""

    def state(self) -> dict[str, Any]:
        """Returns nothing: there is nothing else."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over nothing."""
        del state


def refined(weight: Tensor, value: Tensor) -> Tensor:
    """Returns `value` where no number of the weight's type is nearer to it than the weight; the weight elsewhere.

    Of two that are equally near, either will do: ways differ in which they round to.
    """
    wide = weight.float()
    nearest = (wide - value).abs() <= (value.to(weight.dtype).float() - value).abs()
    return torch.where(nearest, value, wide)
