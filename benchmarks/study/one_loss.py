"""A task of one network and one loss, as most are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from benchmarks.study.task import Turn
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""What is given to the network, and what its loss is computed by."""


class OneLossTask(ABC):
    """Trains with Adam on random batches. The loss of the batch is the score.

    Args:
        seed: of the weights and the batches.
        network: returns the model.
        rate: the learning rate.
    """

    def __init__(self, seed: int, network: Callable[[], nn.Module], rate: float) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = network()
        self.random = torch.Generator().manual_seed(seed)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # An epsilon that stays small beside gradients that vanish. `foreach`: the same numbers, with less time between
        # small kernels.
        self.optimizer = torch.optim.Adam(trained, rate, eps=1e-16, foreach=True)

    @abstractmethod
    def batch(self) -> Batch:
        """Returns a random batch."""

    @abstractmethod
    def loss(self, inputs: Tensor, targets: Tensor, /) -> Tensor:
        """Returns the loss of a batch."""

    def turns(self, step: int) -> Iterator[Turn]:
        batch = self.batch()
        yield Turn(self.optimizer, lambda: self.loss(*batch))

    def score(self, losses: list[float]) -> float:
        """Returns the loss."""
        return losses[-1]
