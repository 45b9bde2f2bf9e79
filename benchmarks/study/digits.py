"""Batches of handwritten digits, and the layers that several tasks read them with."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from examples.demo.data import load_digits
from torch import Generator, Tensor, nn

PIXELS, CLASSES, BATCH_SIZE = 64, 10, 32


class DigitBatches:
    """Draws random images, as rows of pixels from 0 to 1, and the digits that they show.

    Args:
        seed: of what is in the training set.
        random: what batches are drawn by.
    """

    def __init__(self, seed: int, random: Generator) -> None:
        digits = load_digits(seed)
        self._images, self._labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
        self._random = random

    def draw(self) -> tuple[Tensor, Tensor]:
        """Returns the images and the labels of a batch."""
        chosen = torch.randint(len(self._images), (BATCH_SIZE,), generator=self._random)
        return self._images[chosen], self._labels[chosen]


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Returns linear layers of these widths with rectifiers between them."""
    return nn.Sequential(*list(_with_rectifiers(widths))[:-1])


def _with_rectifiers(widths: Sequence[int]) -> Iterator[nn.Module]:
    for inputs, outputs in pairwise(widths):
        yield nn.Linear(inputs, outputs)
        yield nn.ReLU()
