"""The interface of a task, which the CNN and the GPT implement."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradscale.demo.run import Subject


class Losses(NamedTuple):
    """The losses of one batch.

    Attributes:
        trained: the total loss, which is differentiated.
        shown: the part of it that is plotted.
    """

    trained: Tensor
    shown: Tensor


class Task(Protocol):
    """A model, its data and its losses; the same for every recipe."""

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
        """Returns the subject's scores on the test data."""
        ...
