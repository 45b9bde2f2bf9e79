"""A multilayer perceptron, forward and backward, with every array stored as `store` does."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gradscale.demo.numpy.precision import Store, wide
from gradscale.demo.run import Array

Layer = dict[str, Array]


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
