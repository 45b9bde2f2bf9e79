"""Gradients of the model's loss, computed as in a custom training loop of each backend."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from gradscale.demo.keras.model import loss_of
from gradscale.demo.run import Array

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
