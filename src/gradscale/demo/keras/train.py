"""One training step: how `gradscale.keras` is used."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np

from gradscale.demo.digits import LEARNING_RATE, Digits, load_digits
from gradscale.demo.keras.gradients import differentiated
from gradscale.demo.keras.model import LOSSES, WEIGHTS, Network, init_weights, make_taps, targets
from gradscale.demo.run import Array, Gradients, Step
from gradscale.demo.train import Recipe, Trainer
from gradscale.formats import FP16, FP32
from gradscale.keras import LossScaleOptimizer

DTYPES = {FP32: "float32", FP16: "mixed_float16"}
"""The dtype policy of the layers. Weights are always float32."""

EPSILON = 1e-8
"""Adam's, as other frameworks have it. Keras's own 1e-7 is larger than the classifier's gradients."""


class Probe:
    """Computes gradients and outputs at the weights of a run, on networks of its own: each is compiled only once."""

    def __init__(self, weights: list[Array]) -> None:
        self._networks: dict[Any, Any] = {format: Network(dtype, weights) for format, dtype in DTYPES.items()}
        self._gradients = {format: differentiated(network) for format, network in self._networks.items()}

    def gradients(self, recipe: Recipe, weights: list[Array], images: Array, labels: Array, scale: float) -> Gradients:
        """Returns the gradients of a step that starts from `weights`."""
        for network in self._networks.values():
            network.set_weights(weights)
        wanted = targets(images, labels)
        kept = self._gradients[recipe.format](images, [], wanted, scale)
        reference = self._gradients[FP32](images, make_taps(len(images)), wanted, 1.0)
        return Gradients(kept, reference[: len(kept)], reference[len(kept) :])

    def outputs(self, weights: list[Array], images: Array) -> tuple[Array, Array]:
        """Returns the pixels and the logits for images, in FP32."""
        self._networks[FP32].set_weights(weights)
        outputs = self._networks[FP32].predict_on_batch(images)
        return outputs["decoder"], outputs["classifier"]


class KerasTrainer:
    """Trains the autoencoder."""

    def __init__(self, digits: Digits, probe: Probe, seed: int, recipe: Recipe) -> None:
        self._digits, self._probe, self._recipe = digits, probe, recipe
        self._rng = np.random.default_rng(seed)
        self._model: Any = Network(DTYPES[recipe.format], init_weights(self._rng))
        adam = keras.optimizers.Adam(LEARNING_RATE, epsilon=EPSILON)
        self._optimizer = LossScaleOptimizer(adam, policy=recipe.policy)
        # JAX has to compile. For TensorFlow and torch it would take longer than the training of so small a model.
        jit = keras.config.backend() == "jax"
        self._model.compile(self._optimizer, LOSSES, loss_weights=WEIGHTS, jit_compile=jit)

    def step(self, sample: bool) -> Step:
        images, labels = self._digits.batch(self._rng)
        before = self._optimizer.state
        scale, grads = float(before.scale), None
        if sample:
            grads = self._probe.gradients(self._recipe, self._model.get_weights(), images, labels, scale)
        self._model.reset_metrics()
        losses = self._model.train_on_batch(images, targets(images, labels), return_dict=True)
        skipped = bool(self._optimizer.state.skipped > before.skipped)
        return Step(float(losses["classifier_loss"]), scale, skipped, grads)

    def scores(self) -> dict[str, float]:
        return self._digits.scores(*self._probe.outputs(self._model.get_weights(), self._digits.test_images))


def load(seed: int) -> Callable[[Recipe], Trainer]:
    """Returns a function that makes a trainer."""
    return partial(KerasTrainer, load_digits(seed), Probe(init_weights(np.random.default_rng(seed))), seed)
