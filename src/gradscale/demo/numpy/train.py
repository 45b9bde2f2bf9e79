"""One training step: how `gradscale.numpy` is used."""

import numpy as np

from gradscale.demo.digits import LEARNING_RATE, Digits
from gradscale.demo.numpy.adam import Adam
from gradscale.demo.numpy.model import init_params, outputs, run_pass
from gradscale.demo.numpy.precision import half, single
from gradscale.demo.run import Array, Gradients, Step
from gradscale.demo.train import Recipe
from gradscale.formats import FP16, FP32
from gradscale.numpy import LossScaler
from gradscale.numpy.tree import named_arrays

STORES = {FP32: single, FP16: half}
"""How weights, activations and gradients are stored; master weights are always float32."""


class NumpyTrainer:
    """Trains the autoencoder."""

    def __init__(self, digits: Digits, seed: int, recipe: Recipe) -> None:
        self._digits = digits
        self._rng = np.random.default_rng(seed)
        self._params = init_params(self._rng)
        self._store = STORES[recipe.format]
        self._optimizer = Adam(self._params, LEARNING_RATE)
        self._scaler = LossScaler(recipe.policy)

    def step(self, sample: bool) -> Step:
        images, labels = self._digits.batch(self._rng)
        made = run_pass(self._params, images, labels, self._scaler.loss_scale, self._store)
        grads = None
        if sample:
            reference = run_pass(self._params, images, labels, 1.0, single)
            grads = Gradients(_arrays(made.grads), _arrays(reference.grads), reference.activation_grads)
        result = self._scaler.step(made.grads, loss=made.loss)
        if result.applied:
            self._optimizer.update(result.grads)
        return Step(made.classification, float(result.scale), not result.applied, grads)

    def scores(self) -> dict[str, float]:
        return self._digits.scores(*outputs(self._params, self._digits.test_images))


def _arrays(tree: object) -> list[Array]:
    return [array for _, array in named_arrays(tree)]
