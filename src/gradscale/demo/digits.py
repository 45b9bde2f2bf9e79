"""scikit-learn's 1,797 handwritten digits of 8 by 8 pixels, and the autoencoder that three demos train on them."""

from dataclasses import dataclass

import numpy as np

from gradscale.demo.extra import check_extra
from gradscale.demo.run import Array, Subject

TEST_SIZE = 450
BATCH_SIZE = 64

AUTOENCODER = Subject(
    model="autoencoder",
    loss_title="Loss of the classifier",
    scores={"accuracy": ".1%", "pixel error": ".4f"},
    caption="accuracy, loss: of the classifier",
)
"""An autoencoder and a classifier of its code, trained together, the classifier with a small loss weight."""

SIZES = {"encoder": (64, 128, 64), "decoder": (64, 128, 64), "classifier": (64, 128, 128, 128, 10)}

CLASSIFIER_WEIGHT = 1e-6
"""Weight of the classifier's loss beside the reconstruction's. It is why FP16 fails: the gradient of a logit is at most
this over the batch size, 1.6e-8, and everything below 3e-8 is zero in FP16."""

LEARNING_RATE = 3e-3


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

    def scores(self, pixels: Array, logits: Array) -> dict[str, float]:
        """Returns the autoencoder's scores by its outputs for the test images."""
        return {
            "accuracy": float(np.mean(logits.argmax(axis=1) == self.test_labels)),
            "pixel error": float(np.mean(np.square(pixels - self.test_images))),
        }


def load_digits(seed: int) -> Digits:
    """Returns the digits, shuffled and split by `seed`."""
    check_extra()
    from sklearn import datasets

    pixels, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    order = np.random.default_rng(seed).permutation(len(pixels))
    images = (pixels[order] / 16).astype(np.float32)
    labels = labels[order]
    return Digits(images[TEST_SIZE:], labels[TEST_SIZE:], images[:TEST_SIZE], labels[:TEST_SIZE])
