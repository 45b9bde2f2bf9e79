"""The demo in MXNet: FP16 weights, activations and gradients, float32 masters, and Gluon's own training loop."""

import math
import os

# Read when MXNet is loaded. Arrays this small are faster on one thread, and on a busy machine by far.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import partial
from itertools import pairwise
from typing import Any

import mxnet as mx
import numpy as np
from examples.demo.data import AUTOENCODER, CLASSIFIER_WEIGHT, DIGITS_LEARNING_RATE, SIZES, Digits, load_digits
from examples.demo.loop import RECIPES, Demo, Experiment, Recipe
from examples.demo.runs import Array, Gradients, Step
from mxnet import autograd, gluon, nd

from gradscale.mxnet import init_trainer, scale_loss


class KeptDense(gluon.HybridBlock):
    """A dense layer that computes in float32 and stores its output and all gradients in `dtype`.

    MXNet has no matrix product in float16 on a CPU.
    """

    def __init__(self, inputs: int, outputs: int, dtype: str, *, rectified: bool) -> None:
        super().__init__()
        self._outputs, self._dtype, self._rectified = outputs, dtype, rectified
        uniform = mx.init.Uniform(1 / math.sqrt(inputs))
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(outputs, inputs), dtype=dtype, init=uniform)
            self.bias = self.params.get("bias", shape=(outputs,), dtype=dtype, init=uniform)

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any) -> Any:
        """Returns the output of the layer. Gluon calls this, with arrays or with symbols."""
        wide = (F.cast(one, dtype="float32") for one in (x, weight, bias))
        summed = F.FullyConnected(*wide, num_hidden=self._outputs)
        return F.cast(F.relu(summed) if self._rectified else summed, dtype=self._dtype)


class Autoencoder(gluon.Block):
    """Redraws images and names the digits they show. Both outputs are float32, for losses in float32."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = dtype
        with self.name_scope():
            for part, sizes in SIZES.items():
                setattr(self, part, _layers(sizes, dtype))

    def forward(self, images: Any, taps: list[Any] | None = None) -> tuple[Any, Any]:
        """Returns the pixels and the logits.

        Appends to `taps` zeros that are added to each activation: their gradient is that of the activation.
        """
        code = _run(self.encoder, images.astype(self.dtype), taps)
        pixels, logits = (_run(part, code, taps) for part in (self.decoder, self.classifier))
        return pixels.astype("float32"), logits.astype("float32")


def losses_of(model: Autoencoder, images: Any, labels: Any, taps: list[Any] | None = None) -> tuple[Any, Any]:
    """Returns the total loss, and the classifier's before its weight."""
    pixels, logits = model(images, taps)
    classification = gluon.loss.SoftmaxCrossEntropyLoss()(logits, labels).mean()
    return (pixels - images).square().mean() + CLASSIFIER_WEIGHT * classification, classification


def _layers(sizes: tuple[int, ...], dtype: str) -> gluon.nn.HybridSequential:
    layers = gluon.nn.HybridSequential()
    last = len(sizes) - 2
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers.add(KeptDense(inputs, outputs, dtype, rectified=index < last))
    return layers


def _run(layers: Any, x: Any, taps: list[Any] | None) -> Any:
    for layer in layers:
        x = layer(x)
        if taps is not None:
            tap = nd.zeros(x.shape, dtype=x.dtype)
            tap.attach_grad()
            taps.append(tap)
            x = x + tap
    return x


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
        settings = {"learning_rate": DIGITS_LEARNING_RATE, "multi_precision": True}
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


DEMO = Demo(
    RECIPES,
    [Experiment(AUTOENCODER, 800, lambda seed: partial(MXNetTrainer, load_digits(seed), seed), 60.0)],
)
