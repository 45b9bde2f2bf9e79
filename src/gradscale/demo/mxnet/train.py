"""One training step: how `gradscale.mxnet` is used."""

from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

from gradscale.demo.digits import LEARNING_RATE, Digits
from gradscale.demo.mxnet.model import Autoencoder, losses_of
from gradscale.demo.run import Array, Gradients, Step
from gradscale.demo.train import Recipe
from gradscale.mxnet import init_trainer, scale_loss


class MXNetTrainer:
    """Trains the autoencoder. Master weights are always float32.

    A second model in float32 takes over the weights when gradients are compared or the model is evaluated.
    """

    def __init__(self, digits: Digits, seed: int, recipe: Recipe) -> None:
        self._digits = digits
        self._rng = np.random.default_rng(seed)
        mx.random.seed(seed)
        self._model, self._reference = Autoencoder(recipe.format.dtype_name), Autoencoder("float32")
        for model in (self._reference, self._model):
            model.initialize()
        _copy(self._reference, self._model)  # MXNet draws other numbers for float16
        self._model.hybridize()
        settings = {"learning_rate": LEARNING_RATE, "multi_precision": True}
        self._trainer = gluon.Trainer(self._model.collect_params(), "adam", settings)
        self._scaler = init_trainer(self._trainer, recipe.policy)

    def step(self, sample: bool) -> Step:
        images, labels = map(nd.array, self._digits.batch(self._rng))
        with autograd.record():
            loss, shown = losses_of(self._model, images, labels)
            with scale_loss(loss, self._trainer) as scaled:
                scaled.backward()
        grads = self._gradients(images, labels) if sample else None
        self._trainer.step(1)
        return Step(float(shown.asscalar()), float(self._scaler.last.scale), self._scaler.last.skipped(), grads)

    def scores(self) -> dict[str, float]:
        _copy(self._model, self._reference)
        pixels, logits = self._reference(nd.array(self._digits.test_images))
        return self._digits.scores(pixels.asnumpy(), logits.asnumpy())

    def _gradients(self, images: Any, labels: Any) -> Gradients:
        _copy(self._model, self._reference)
        taps: list[Any] = []
        with autograd.record():
            loss, _ = losses_of(self._reference, images, labels, taps)
        loss.backward()
        return Gradients(_grads(self._model), _grads(self._reference), [tap.grad.asnumpy() for tap in taps])


def _params(model: Autoencoder) -> list[Any]:
    return list(model.collect_params().values())


def _grads(model: Autoencoder) -> list[Array]:
    return [param.grad().asnumpy() for param in _params(model)]


def _copy(source: Autoencoder, target: Autoencoder) -> None:
    """Sets the target's weights to the source's, rounded to the target's dtype."""
    for given, taken in zip(_params(source), _params(target), strict=True):
        taken.set_data(given.data().astype(target.dtype))
