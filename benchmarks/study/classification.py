"""Classifiers of digits whose gradients are unusual: they vanish, are not finite, or come from a teacher."""

import copy
from collections.abc import Iterator
from functools import cache

import torch
from benchmarks.study.digits import CLASSES, PIXELS, DigitBatches, layers
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

WIDTH = 64
RATE = 1e-3


class DigitsTask(OneLossTask):
    """Classifies digits by an MLP.

    Args:
        seed: of the weights and the batches.
        widths: of the layers between the image and the classes.
    """

    def __init__(self, seed: int, widths: tuple[int, ...] = (WIDTH, WIDTH)) -> None:
        super().__init__(seed, lambda: layers((PIXELS, *widths, CLASSES)), RATE)
        self.digits = DigitBatches(seed, self.random)

    def batch(self) -> Batch:
        return self.digits.draw()

    def loss(self, images: Tensor, labels: Tensor, /) -> Tensor:
        return cross_entropy(self.model(images), labels)


class DeepTask(DigitsTask):
    """Has many layers without a norm, whose gradients vanish toward the input: torch's initial weights shrink them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, (32,) * 10)


class ConsistencyTask(DigitsTask):
    """Adds the distance of the logits of each image from those of the same image with noise.

    Of some batches the noise was left out. The distance is zero then, and so is what the root in it divides by: the
    loss is finite, and its gradient is not, at any scale.

    Args:
        seed: of the weights and the batches.
        bad_share: share of the batches without noise.
    """

    def __init__(self, seed: int, bad_share: float) -> None:
        super().__init__(seed)
        self._bad_share = bad_share

    def turns(self, step: int) -> Iterator[Turn]:
        images, labels = self.digits.draw()
        bad = float(torch.rand((), generator=self.random)) < self._bad_share
        noise = torch.randn(images.shape, generator=self.random) * (0.0 if bad else 0.1)
        yield Turn(self.optimizer, lambda: self._consistent_loss(images, labels, images + noise), bad=bad)

    def _consistent_loss(self, images: Tensor, labels: Tensor, noisy: Tensor) -> Tensor:
        logits = self.model(images)
        distance = (logits - self.model(noisy)).square().sum(1).sqrt().mean()
        return cross_entropy(logits, labels) + 0.1 * distance


class DistillationTask(DigitsTask):
    """Learns the answers of a wider teacher at a high temperature, whose gradients are small beside those of labels."""

    temperature = 8.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed, (16,))
        self._teacher = trained(seed, (128, 128))

    def batch(self) -> Batch:
        images, _ = self.digits.draw()
        with torch.no_grad():
            return images, (self._teacher(images) / self.temperature).softmax(1)

    def loss(self, images: Tensor, answers: Tensor) -> Tensor:
        found = (self.model(images) / self.temperature).log_softmax(1)
        return kl_div(found, answers, reduction="batchmean")


def trained(seed: int, widths: tuple[int, ...]) -> nn.Sequential:
    """Returns the layers of a classifier that was trained in FP32, once for all rules."""
    return copy.deepcopy(_trained(seed, widths))


@cache
def _trained(seed: int, widths: tuple[int, ...]) -> nn.Sequential:
    task = DigitsTask(seed, widths)
    for _ in range(300):
        task.optimizer.zero_grad()
        task.loss(*task.batch()).backward()
        task.optimizer.step()
    assert isinstance(task.model, nn.Sequential)
    return task.model
