"""The autoencoder and its classifier as two outputs of one Keras model."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from gradscale.demo.digits import CLASSIFIER_WEIGHT, SIZES
from gradscale.demo.numpy.model import init_params
from gradscale.demo.run import Array
from gradscale.numpy.tree import named_arrays

LOSSES = {
    "decoder": keras.losses.MeanSquaredError(),
    "classifier": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
}

WEIGHTS = {"decoder": 1.0, "classifier": CLASSIFIER_WEIGHT}
"""The `loss_weights` of `compile`."""


class Network(keras.Model):
    """The model, with weights that are the same for a seed on every backend."""

    def __init__(self, dtype: str, weights: Sequence[Array]) -> None:
        super().__init__(dtype=dtype)
        self.parts = {
            part: [keras.layers.Dense(width, kernel_initializer="zeros", dtype=dtype) for width in sizes[1:]]
            for part, sizes in SIZES.items()
        }
        self(np.zeros((1, SIZES["encoder"][0]), np.float32))  # makes the variables
        self.set_weights(weights)

    def call(self, images: Any, taps: Sequence[Any] | None = None) -> dict[str, Any]:
        """Returns the pixels and the logits. `taps` are zeros to add to the outputs of the layers."""
        left = None if taps is None else iter(taps)
        code = self._through("encoder", images, left)
        return {part: self._through(part, code, left) for part in LOSSES}

    def _through(self, part: str, x: Any, taps: Iterator[Any] | None) -> Any:
        *hidden, last = self.parts[part]
        for layer in hidden:
            x = keras.ops.relu(_summed(layer(x), taps))
        return _summed(last(x), taps)


def _summed(x: Any, taps: Iterator[Any] | None) -> Any:
    return x if taps is None else x + next(taps)


def make_taps(rows: int) -> list[Array]:
    """Returns zeros in the shapes of the layers' outputs, in the order of `call`."""
    order = ("encoder", *LOSSES)
    return [np.zeros((rows, width), np.float32) for part in order for width in SIZES[part][1:]]


def init_weights(rng: np.random.Generator) -> list[Array]:
    """Returns the initial weights, the same on every backend."""
    return [array for _, array in named_arrays(init_params(rng))]


def targets(images: Array, labels: Array) -> dict[str, Array]:
    """Returns the target of each output."""
    return {"decoder": images, "classifier": labels}


def loss_of(outputs: Any, wanted: Any) -> Any:
    """Returns the loss that `compile` makes of the losses and their weights, as a tensor to differentiate."""
    return sum(WEIGHTS[part] * loss(wanted[part], outputs[part]) for part, loss in LOSSES.items())
