"""Contrastive learning by InfoNCE: which two of many noisy images are the same one."""

import torch
from benchmarks.study.digits import BATCH_SIZE, PIXELS, DigitBatches, layers
from benchmarks.study.one_loss import Batch, OneLossTask
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

TEMPERATURE = 0.05
"""Similarities are divided by it. It is low, as in CLIP, and so gradients are large until the pairs are found."""


class ContrastiveTask(OneLossTask):
    """Makes the features of two noisy copies of an image similar, and those of others not."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: layers((PIXELS, 64, 64, 16)), 1e-3)
        self._digits = DigitBatches(seed, self.random)

    def batch(self) -> Batch:
        images, _ = self._digits.draw()
        return self._noisy(images), self._noisy(images)

    def loss(self, images: Tensor, others: Tensor) -> Tensor:
        similar = normalize(self.model(images)) @ normalize(self.model(others)).T
        return cross_entropy(similar.float() / TEMPERATURE, torch.arange(BATCH_SIZE))

    def _noisy(self, images: Tensor) -> Tensor:
        return images + 0.3 * torch.randn(images.shape, generator=self.random)
