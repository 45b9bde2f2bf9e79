"""The data: scikit-learn's 1,797 handwritten digits of 8 by 8 pixels, which come with the package."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscale.demo.extra import check_extra

Array = np.ndarray[Any, Any]

TEST_SIZE = 450
BATCH_SIZE = 64


@dataclass(frozen=True)
class Digits:
    """Images, as rows of 64 pixels from 0 to 1, and the digits they show; split into training and test."""

    images: Array
    labels: Array
    test_images: Array
    test_labels: Array

    def batch(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Returns a random batch of training images and their labels."""
        chosen = rng.integers(0, len(self.images), BATCH_SIZE)
        return self.images[chosen], self.labels[chosen]


def load_digits(seed: int) -> Digits:
    """Returns the digits, shuffled and split by `seed`."""
    check_extra()
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(pixels))
    images = (pixels[order] / 16).astype(np.float32)
    labels = labels[order]
    return Digits(images[TEST_SIZE:], labels[TEST_SIZE:], images[:TEST_SIZE], labels[:TEST_SIZE])
