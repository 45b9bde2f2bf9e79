"""A deep CNN with BatchNorm that reads handwritten digits."""

from collections.abc import Iterator

import numpy as np
import torch
from benchmarks.study.task import Turn
from examples.demo.data import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CHANNELS, DEPTH, BATCH_SIZE = 8, 8, 16


def deep_cnn() -> nn.Module:
    """Returns convolutions with BatchNorm, one after the other, and a classifier of their mean."""
    layers: list[nn.Module] = []
    for index in range(DEPTH):
        layers += [nn.Conv2d(CHANNELS if index else 1, CHANNELS, 3, stride=2 if index in (2, 5) else 1, padding=1)]
        layers += [nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * CHANNELS, 10))


class VisionTask:
    """Classifies images; of some batches the loss is multiplied, as by a wrong weight in the data.

    Args:
        seed: of the weights and the batches.
        bad_share: share of the batches that are bad.
        bad_factor: what their loss is multiplied by.
    """

    def __init__(self, seed: int, bad_share: float = 0.0, bad_factor: float = 100.0) -> None:
        torch.manual_seed(seed)
        self.model = deep_cnn()
        self._digits = load_digits(seed)
        self._rng = np.random.default_rng(seed)
        # `foreach`: the same numbers, with less time between small kernels.
        self._optimizer = torch.optim.Adam(self.model.parameters(), 3e-3, foreach=True)
        self._bad_share, self._bad_factor, self._factor = bad_share, bad_factor, 1.0

    def turns(self, step: int) -> Iterator[Turn]:
        chosen = self._rng.integers(0, len(self._digits.images), BATCH_SIZE)
        images = torch.from_numpy(self._digits.images[chosen]).view(-1, 1, 8, 8)
        labels = torch.from_numpy(self._digits.labels[chosen])
        bad = self._rng.random() < self._bad_share
        self._factor = self._bad_factor if bad else 1.0
        yield Turn(self._optimizer, lambda: self._loss(images, labels) * self._factor, bad=bad)

    def score(self, losses: list[float]) -> float:
        """Returns the loss without its factor."""
        return losses[-1] / self._factor

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(images), labels)
