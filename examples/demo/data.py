"""The data: handwritten digits, and the source code of Python's standard library; and what two demos train on each."""

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from examples.demo.runs import Array, Subject

TEST_DIGITS = 450
DIGITS_BATCH = 64

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

DIGITS_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Digits:
    """Images, as rows of 64 pixels from 0 to 1, and the digits they show; split into training and test."""

    images: Array
    labels: Array
    test_images: Array
    test_labels: Array

    def batch(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Returns a random batch of training images and their labels."""
        chosen = rng.integers(0, len(self.images), DIGITS_BATCH)
        return self.images[chosen], self.labels[chosen]

    def scores(self, pixels: Array, logits: Array) -> dict[str, float]:
        """Returns the autoencoder's scores by its outputs for the test images."""
        return {
            "accuracy": float(np.mean(logits.argmax(axis=1) == self.test_labels)),
            "pixel error": float(np.mean(np.square(pixels - self.test_images))),
        }


def load_digits(seed: int) -> Digits:
    """Returns scikit-learn's 1,797 digits of 8 by 8 pixels, shuffled and split by `seed`."""
    from sklearn import datasets

    pixels, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    order = np.random.default_rng(seed).permutation(len(pixels))
    images = (pixels[order] / 16).astype(np.float32)
    labels = labels[order]
    return Digits(images[TEST_DIGITS:], labels[TEST_DIGITS:], images[:TEST_DIGITS], labels[:TEST_DIGITS])


MODULES = ("argparse", "ast", "dataclasses", "difflib", "inspect", "subprocess")
"""Modules of one file each, in every Python since 3.11: about half a megabyte."""

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
"""The characters: the printable ones of ASCII and the newline. Others are left out of the text."""

TEST_SHARE = 0.1

LANGUAGE = Subject(
    model="gpt",
    loss_title="Loss of the GPT's second head",
    scores={"perplexity": ".1f", "main head": ".1f"},
    caption="perplexity, loss: of the second head; main head: its perplexity",
)
"""A GPT with a head for the next character and, at a small weight, a head for the character after it."""

AHEAD_WEIGHT = 1e-5
"""Weight of the second head's loss. It is why FP16 fails: the gradient of its logits is at most this over the 512
characters of a batch, 2e-8, and everything below 3e-8 is zero in FP16."""

TEXT_LEARNING_RATE = 4e-3
LENGTH = 32
SEQUENCES = 16
TEST_SEQUENCES = 512
WIDTH, HEADS, DEPTH = 32, 4, 2


@dataclass(frozen=True)
class Text:
    """Characters by their index in `VOCABULARY`; the first part for training, the rest for the test."""

    train: Array
    test: Array

    def batch(self, draw: Callable[..., Array], sequences: int = SEQUENCES, length: int = LENGTH + 2) -> Array:
        """Returns random sequences of the training text, one in each row.

        Args:
            draw: returns random integers from 0 up to its argument, in the shape `size`, as numpy's `integers` does.
            sequences: how many.
            length: of each; by default the second head's targets are included.
        """
        return self.train[draw(len(self.train) - length + 1, size=(sequences, 1)) + np.arange(length)]

    def test_rows(self) -> Array:
        """Returns the beginning of the test text in rows like those of a batch."""
        return self.test[: TEST_SEQUENCES * (LENGTH + 2)].reshape(TEST_SEQUENCES, LENGTH + 2)


def load_text() -> Text:
    """Returns the text. The same interpreter gives the same text."""
    folder = Path(sysconfig.get_path("stdlib"))
    source = "".join((folder / f"{module}.py").read_text(encoding="utf-8") for module in MODULES)
    index_of = {character: index for index, character in enumerate(VOCABULARY)}
    indices = np.array([index_of[character] for character in source if character in index_of])
    train_size = int(len(indices) * (1 - TEST_SHARE))
    return Text(indices[:train_size], indices[train_size:])


def gpt_scores(next_loss: float, ahead_loss: float) -> dict[str, float]:
    """Returns the GPT's scores by the mean cross-entropies of its two heads."""
    return {"perplexity": math.exp(ahead_loss), "main head": math.exp(next_loss)}
