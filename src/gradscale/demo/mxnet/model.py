"""The autoencoder and its classifier in Gluon."""

import math
from itertools import pairwise
from typing import Any

import mxnet as mx
from mxnet import gluon, nd

from gradscale.demo.digits import CLASSIFIER_WEIGHT, SIZES


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
