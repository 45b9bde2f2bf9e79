"""The demo in numpy, with nothing but numpy: true float16 arithmetic, written out.

Weights, activations and gradients are stored in float16. Sums are in float32 and rounded once, as on tensor cores.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from examples.demo.data import AUTOENCODER, CLASSIFIER_WEIGHT, DIGITS_LEARNING_RATE, SIZES, Digits, load_digits
from examples.demo.loop import RECIPES, Demo, Experiment, Recipe, Workers
from examples.demo.runs import Array, Gradients, Step

from gradscale import FP16, FP32
from gradscale.numpy import LossScaler
from gradscale.numpy.tree import mapped, named_arrays

Layer = dict[str, Array]
Params = dict[str, list[Layer]]
Store = Callable[[Array], Array]
"""Takes a float32 array and returns it as it is stored."""

SMALLEST_NORMAL = np.float32(2.0**-14)
ROUNDER = np.float32(0.75)
"""Float32 numbers near 0.75 are 2**-24 apart, as float16's subnormals are, so adding it rounds as float16 would."""


with np.errstate(invalid="ignore"):  # some of the NaNs are signaling
    WIDENED = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""Every float16 number in float32. A lookup is twenty times faster than numpy's conversion of a subnormal."""


def single(values: Array) -> Array:
    """Returns the array as it is: stored in float32."""
    return values


def half(values: Array) -> Array:
    """Returns the array in float16: rounded to nearest, infinite above 65504, zero below 2**-25.

    Subnormals are rounded before the conversion: numpy takes fifty times as long for those it has to round.
    """
    subnormal = np.abs(values) < SMALLEST_NORMAL
    rounded = np.where(subnormal, (values + ROUNDER) - ROUNDER, values)
    with np.errstate(over="ignore"):
        return rounded.astype(np.float16)


def wide(stored: Array) -> Array:
    """Returns a stored array in float32, for computing with."""
    return WIDENED.take(stored.view(np.uint16)) if stored.dtype == np.float16 else stored


def init_layers(sizes: Sequence[int], rng: np.random.Generator) -> list[Layer]:
    """Returns float32 layers, initialized as `torch.nn.Linear` is: uniform between plus and minus 1/sqrt(inputs)."""
    return [
        {
            name: rng.uniform(-1, 1, shape).astype(np.float32) / np.float32(np.sqrt(inputs))
            for name, shape in (("weight", (inputs, outputs)), ("bias", (outputs,)))
        }
        for inputs, outputs in pairwise(sizes)
    ]


def forward(layers: Sequence[Layer], inputs: Array, store: Store) -> list[Array]:
    """Returns `inputs` and the output of every layer, as stored: rectified, except for the last."""
    activations = [inputs]
    for layer in layers:
        summed = wide(activations[-1]) @ layer["weight"] + layer["bias"]
        activations.append(store(summed if layer is layers[-1] else np.maximum(summed, 0)))
    return activations


def backward(
    layers: Sequence[Layer], activations: Sequence[Array], grad: Array, store: Store
) -> tuple[list[Layer], list[Array]]:
    """Returns the gradients of the layers, and those of the activations from the last to the first."""
    layer_grads: list[Layer] = []
    activation_grads = [grad]
    for layer, inputs in zip(reversed(layers), reversed(activations[:-1]), strict=True):
        grad = wide(activation_grads[-1])
        layer_grads.insert(0, {"weight": store(wide(inputs).T @ grad), "bias": store(grad.sum(axis=0))})
        passed = grad @ layer["weight"].T
        activation_grads.append(store(passed if inputs is activations[0] else passed * (inputs > 0)))
    return layer_grads, activation_grads


@dataclass(frozen=True)
class Pass:
    """The losses and gradients of one forward and backward pass.

    Attributes:
        reconstruction: mean squared error of the pixels.
        classification: cross-entropy of the classifier, before its weight.
        grads: gradients of the parameters, times the scale, as they are stored.
        activation_grads: gradients of the activations, likewise.
    """

    reconstruction: float
    classification: float
    grads: Params
    activation_grads: list[Array]

    @property
    def loss(self) -> float:
        """The total loss."""
        return self.reconstruction + CLASSIFIER_WEIGHT * self.classification


def init_params(rng: np.random.Generator) -> Params:
    """Returns the float32 parameters that training starts from."""
    return {part: init_layers(sizes, rng) for part, sizes in SIZES.items()}


@np.errstate(over="ignore", invalid="ignore")  # the scaler finds what overflows
def run_pass(params: Params, images: Array, labels: Array, scale: float, store: Store) -> Pass:
    """Returns the losses of a batch, and the gradients of `scale` times the loss."""
    kept: Params = mapped(params, lambda _, array: wide(store(array)))
    encoded = forward(kept["encoder"], store(images), store)
    decoded = forward(kept["decoder"], encoded[-1], store)
    classified = forward(kept["classifier"], encoded[-1], store)
    error = wide(decoded[-1]) - images
    cross_entropy, logit_grad = _cross_entropy(wide(classified[-1]), labels)

    pixel_grad = store(error * np.float32(2 * scale / error.size))
    decoder, decoder_grads = backward(kept["decoder"], decoded, pixel_grad, store)
    logit_grad = store(logit_grad * np.float32(CLASSIFIER_WEIGHT * scale))
    classifier, classifier_grads = backward(kept["classifier"], classified, logit_grad, store)
    code_grad = store(wide(decoder_grads[-1]) + wide(classifier_grads[-1]))
    encoder, encoder_grads = backward(kept["encoder"], encoded, code_grad, store)
    return Pass(
        reconstruction=float(np.square(error).mean()),
        classification=cross_entropy,
        grads={"encoder": encoder, "decoder": decoder, "classifier": classifier},
        activation_grads=[*decoder_grads, *classifier_grads, *encoder_grads],
    )


def outputs(params: Params, images: Array) -> tuple[Array, Array]:
    """Returns the pixels and the logits for images, in float32."""
    code = forward(params["encoder"], images, single)[-1]
    return forward(params["decoder"], code, single)[-1], forward(params["classifier"], code, single)[-1]


def _cross_entropy(logits: Array, labels: Array) -> tuple[float, Array]:
    """Returns the mean cross-entropy of the softmax of `logits`, and its gradient, in float32."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    grad = np.exp(log_probabilities)
    grad[rows, labels] -= 1
    return -float(log_probabilities[rows, labels].mean()), grad / np.float32(len(labels))


class Adam:
    """Updates parameters in place. The defaults are those of `torch.optim.Adam`, except for the learning rate."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self._params = [array for _, array in named_arrays(params)]
        self._means = [np.zeros_like(param) for param in self._params]
        self._squares = [np.zeros_like(param) for param in self._params]
        self._lr, self._betas, self._eps = lr, betas, eps
        self._steps = 0

    def update(self, grads: Any) -> None:
        """Takes a step with unscaled gradients, in the structure of the parameters."""
        self._steps += 1
        first, second = self._betas
        root = (1 - second**self._steps) ** 0.5
        rate = self._lr * root / (1 - first**self._steps)
        arrays = [array for _, array in named_arrays(grads)]
        for param, mean, square, grad in zip(self._params, self._means, self._squares, arrays, strict=True):
            mean += np.float32(1 - first) * (grad - mean)
            square += np.float32(1 - second) * (grad * grad - square)
            param -= np.float32(rate) * mean / (np.sqrt(square) + np.float32(self._eps * root))


STORES = {FP32: single, FP16: half}
"""How weights, activations and gradients are stored; master weights are always float32."""


class NumpyTrainer:
    """Trains the autoencoder."""

    def __init__(self, digits: Digits, seed: int, recipe: Recipe) -> None:
        self._digits = digits
        self._rng = np.random.default_rng(seed)
        self._params = init_params(self._rng)
        self._store = STORES[recipe.format]
        self._optimizer = Adam(self._params, DIGITS_LEARNING_RATE)
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


@contextmanager
def _one_blas_thread() -> Iterator[Workers]:
    """Yields the caller's thread. Matrices this small are faster on one thread, and on a busy machine by far."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"), Workers() as workers:
        yield workers


DEMO = Demo(
    RECIPES,
    [Experiment(AUTOENCODER, 800, lambda seed: partial(NumpyTrainer, load_digits(seed), seed), 20.0)],
    _one_blas_thread,
)
