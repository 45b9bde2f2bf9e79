"""The model: an autoencoder whose code a classifier reads, trained together, the classifier at a small weight."""

from dataclasses import dataclass

import numpy as np

from gradscale.demo.numpy.network import Layer, backward, forward, init_layers
from gradscale.demo.numpy.precision import Array, Store, single, wide
from gradscale.demo.run import Score, Subject
from gradscale.numpy.tree import mapped

ACCURACY = Score("accuracy", ".1%")
PIXEL_ERROR = Score("pixel error", ".4f")

SUBJECT = Subject(
    model="autoencoder",
    loss_title="Loss of the classifier",
    scores=(ACCURACY, PIXEL_ERROR),
    caption="accuracy, loss: of the classifier",
)

SIZES = {"encoder": (64, 128, 64), "decoder": (64, 128, 64), "classifier": (64, 128, 128, 128, 10)}

CLASSIFIER_WEIGHT = 1e-6
"""Weight of the classifier's loss beside the reconstruction's, and the cause of the trouble: the gradient of a logit is
at most this over the batch size, 1.6e-8, and all below 3e-8 is zero in FP16."""

Params = dict[str, list[Layer]]


@dataclass(frozen=True)
class Pass:
    """What one forward and backward pass made.

    Attributes:
        reconstruction: mean squared error of the pixels.
        classification: cross-entropy of the classifier, before its weight.
        grads: gradients of the parameters, times the scale, as they are kept.
        activation_grads: gradients of the activations, likewise.
    """

    reconstruction: float
    classification: float
    grads: Params
    activation_grads: list[Array]

    @property
    def loss(self) -> float:
        """The loss that is trained."""
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


def evaluate(params: Params, images: Array, labels: Array) -> dict[str, float]:
    """Returns the share of images classified rightly, and the mean squared error of their pixels, in float32."""
    code = forward(params["encoder"], images, single)[-1]
    guesses = forward(params["classifier"], code, single)[-1].argmax(axis=1)
    pixels = forward(params["decoder"], code, single)[-1]
    return {
        ACCURACY.name: float((guesses == labels).mean()),
        PIXEL_ERROR.name: float(np.square(pixels - images).mean()),
    }


def _cross_entropy(logits: Array, labels: Array) -> tuple[float, Array]:
    """Returns the mean cross-entropy of the softmax of `logits`, and its gradient, in float32."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    grad = np.exp(log_probabilities)
    grad[rows, labels] -= 1
    return -float(log_probabilities[rows, labels].mean()), grad / np.float32(len(labels))
