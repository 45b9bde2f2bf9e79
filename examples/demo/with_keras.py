"""The demo in Keras: a model with two outputs, compiled with a `LossScaleOptimizer`, on any backend.

The weights that it starts from are the same on every backend, and those of the demo in numpy.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from examples.demo.data import AUTOENCODER, CLASSIFIER_WEIGHT, DIGITS_LEARNING_RATE, SIZES, Digits, load_digits
from examples.demo.loop import RECIPES, Demo, Experiment, Recipe, Trainer
from examples.demo.runs import Array, Gradients, Step
from examples.demo.with_numpy import init_params

from gradscale import FP16, FP32
from gradscale.numpy.tree import named_arrays

BACKENDS = ("torch", "jax", "tensorflow")
"""Backends that can train; the fastest to start comes first."""


def import_keras() -> str:
    """Imports Keras, and returns the name of the backend that it runs on. Leaves the environment as it was.

    Raises:
        ValueError: no backend is installed, or the one that was chosen does not train.
    """
    # TensorFlow would log how it was built, in the middle of the progress bars.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    is_open = "keras" not in sys.modules and not os.environ.get("KERAS_BACKEND")
    if is_open:
        os.environ["KERAS_BACKEND"] = _first_installed()
    import keras

    if is_open:
        del os.environ["KERAS_BACKEND"]
    chosen = keras.config.backend()
    if chosen not in BACKENDS:
        raise ValueError(f"Keras must run on one of {', '.join(BACKENDS)}. Received: {chosen}. Set KERAS_BACKEND.")
    return chosen


def _first_installed() -> str:
    for backend in BACKENDS:
        if find_spec(backend):
            return backend
    raise ValueError(f"Keras runs on one of {', '.join(BACKENDS)}. Received none that is installed: pip install torch.")


import_keras()

import keras  # noqa: E402

from gradscale.keras import LossScaleOptimizer  # noqa: E402

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


Differentiated = Callable[[Array, Sequence[Array], Any, float], list[Array]]
"""Takes images, taps, targets and a scale. Returns the gradients of the loss times the scale: by the model's weights,
and by the taps."""


def differentiated(model: Any) -> Differentiated:
    """Returns a function that computes gradients of the model's loss at its current weights."""
    take = {"tensorflow": _with_tensorflow, "jax": _with_jax, "torch": _with_torch}[keras.config.backend()](model)

    def gradients(images: Array, taps: Sequence[Array], wanted: Any, scale: float) -> list[Array]:
        given = (images, list(taps), wanted, np.float32(scale))
        placed: Any = keras.tree.map_structure(keras.ops.convert_to_tensor, given)
        return [np.asarray(keras.ops.convert_to_numpy(grad)) for grad in take(*placed)]

    return gradients


def _with_tensorflow(model: Any) -> Callable[..., Any]:
    import tensorflow as tf

    @tf.function
    def take(images: Any, taps: Any, wanted: Any, scale: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(taps)
            loss = loss_of(model(images, taps or None), wanted) * scale
        return tape.gradient(loss, [*model.trainable_variables, *taps])

    return take


def _with_jax(model: Any) -> Callable[..., Any]:
    import jax

    def loss(weights: Any, taps: Any, images: Any, wanted: Any, scale: Any) -> Any:
        outputs, _ = model.stateless_call(weights, [], images, taps or None)
        return loss_of(outputs, wanted) * scale

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1)))

    def take(images: Any, taps: Any, wanted: Any, scale: Any) -> Any:
        weights = [variable.value for variable in model.trainable_variables]
        return jax.tree.leaves(compiled(weights, taps, images, wanted, scale))

    return take


def _with_torch(model: Any) -> Callable[..., Any]:
    import torch

    def take(images: Any, taps: Any, wanted: Any, scale: Any) -> Any:
        for tap in taps:
            tap.requires_grad_()
        loss = loss_of(model(images, taps or None), wanted) * scale
        return torch.autograd.grad(loss, [*(variable.value for variable in model.trainable_variables), *taps])

    return take


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
        adam = keras.optimizers.Adam(DIGITS_LEARNING_RATE, epsilon=EPSILON)
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


DEMO = Demo(RECIPES, [Experiment(AUTOENCODER, 600, load, 60.0)])
