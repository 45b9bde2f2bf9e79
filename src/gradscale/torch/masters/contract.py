"""The interface of storages of master weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.step_buffers import StepBuffer


class MasterStorage(ABC):
    """Computes float32 values from 16-bit weights and what is stored beside them, and writes them back.

    All are plain tensors: of a distributed parameter, what this rank holds.

    Attributes:
        stored_bytes: bytes stored beside each element of a weight.
        stores_values: whether the float32 values themselves are stored, and not something to compute them from.
    """

    stored_bytes: ClassVar[int]
    stores_values: ClassVar[bool] = False

    @abstractmethod
    def store(self, weight: Tensor) -> Tensor:
        """Returns what to store beside a weight whose value is exact."""

    @abstractmethod
    def read(self, weights: Sequence[Tensor], stored: Sequence[Tensor], buffer: StepBuffer) -> Sequence[Tensor]:
        """Returns the float32 values. They are valid until `buffer` is used again."""

    @abstractmethod
    def write(
        self,
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
        stored: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        """Rounds the values into the weights, and stores what the rounding lost.

        `parameters` are the model's own, of which `weights` are this rank's parts if they are distributed.
        Values that `read` returned, written back unchanged, must change nothing: where a fused kernel has skipped the
        step, the host does not know it, and `write` is called all the same.
        """

    def end_step(self, skip: Tensor | None) -> None:
        """Ends a step whose values have all been written. `skip` is 1 where it was skipped; None if it was not."""
        del skip

    def adopt(self, weight: Tensor, stored: Tensor) -> None:
        """Updates what is stored for a weight that other code has written to. By default the low bits become 0."""
        del weight
        stored.zero_()

    def restore(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        """Loads saved values where they round to the weight. Elsewhere the weight takes precedence."""
        self.write([refined(weight, value)], [weight], [stored], [weight])

    def state(self) -> dict[str, Any]:
        """Returns what else is needed to resume bit-exactly."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Loads what `state` returned, of this storage or of another."""
        del state


def refined(weight: Tensor, value: Tensor) -> Tensor:
    """Returns `value` where no number of the weight's dtype is nearer to it than the weight; the weight elsewhere.

    At a tie both neighbors count as nearest: storages differ in which of the two they round to.
    """
    wide = weight.float()
    nearest = (wide - value).abs() <= (value.to(weight.dtype).float() - value).abs()
    return torch.where(nearest, value, wide)
