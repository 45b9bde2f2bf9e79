"""The autoencoder and its classifier, forward and backward."""

from dataclasses import dataclass

import numpy as np

from gradscale.demo.digits import CLASSIFIER_WEIGHT, SIZES
from gradscale.demo.numpy.network import Layer, backward, forward, init_layers
from gradscale.demo.numpy.precision import Store, single, wide
from gradscale.demo.run import Array
from gradscale.numpy.tree import mapped

Params = dict[str, list[Layer]]


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
