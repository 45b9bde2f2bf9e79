"""What is trained: a model, its data and its losses."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradscale.demo.run import Subject


class Losses(NamedTuple):
    """The losses of one batch.

    Attributes:
        trained: what the gradients are taken of.
        shown: the part of it that the subject is about, for the picture.
    """

    trained: Tensor
    shown: Tensor


class Task(Protocol):
    """Something to train, the same for every way to train it."""

    subject: Subject
    learning_rate: float

    def model(self) -> nn.Module:
        """Returns a new model on the task's device, drawn from torch's random numbers."""
        ...

    def batch(self, generator: torch.Generator) -> Any:
        """Returns a random batch."""
        ...

    def losses(self, model: nn.Module, batch: Any) -> Losses:
        """Returns the losses of a batch, in float32."""
        ...

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Returns what the subject's scores are on test data, computed in float32."""
        ...
