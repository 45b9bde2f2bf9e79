"""The gradients of a trainer: whose they are, on which context, and whether a backward pass has just made them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mxnet import autograd

from gradscale.policies.checks import LOWEST_SCALE

PART = 2.0**-60
"""What gradients are multiplied by where a factor is too small for MXNet."""


class Slot(NamedTuple):
    """One parameter's gradient on one context.

    Attributes:
        name: the parameter.
        weight: its values there, which also know whether the gradient is fresh.
        grad: the gradient.
    """

    name: str
    weight: Any
    grad: Any

    @property
    def fresh(self) -> bool:
        """Whether a backward pass has written the gradient since the last step."""
        return bool(self.weight._fresh_grad)

    @property
    def values(self) -> Any:
        """The gradient as a dense array; of a sparse one the rows that it holds. Shares its memory."""
        grad = self.grad.as_nd_ndarray()
        return grad if grad.stype == "default" else grad.data

    def multiply(self, factor: float) -> None:
        """Multiplies the gradient in place, in float32: a factor like 2**-25 is zero in float16."""
        grad = self.grad.as_nd_ndarray()
        with autograd.pause():  # as what happens to gradients is no part of the model
            wide = grad.astype("float32") if is_half(grad) else grad
            (wide * factor).astype(grad.dtype).copyto(grad)


Gradients = Sequence[Sequence[Slot]]
"""The slots of each context."""


def collect(trainer: Any) -> Gradients:
    """Returns the gradients of all parameters that take part in training."""
    trained = [param for param in trainer._params if param.grad_req != "null"]
    slots = [
        [Slot(param.name, weight, grad) for weight, grad in zip(param.list_data(), param.list_grad(), strict=True)]
        for param in trained
    ]
    return list(zip(*slots, strict=True))


def fresh(gradients: Gradients) -> Gradients:
    """Returns those gradients that a backward pass has written since the last step."""
    return [[slot for slot in slots if slot.fresh] for slots in gradients]


def spend(gradients: Gradients) -> None:
    """Marks the gradients as used, as an update does: those of a skipped step must not be taken for new ones."""
    for slots in gradients:
        for slot in slots:
            slot.weight._fresh_grad = False


def multiply(gradients: Gradients, factor: float) -> None:
    """Multiplies all gradients in place, in float32 or wider."""
    for slots in gradients:
        for slot in slots:
            slot.multiply(factor)


def with_normal_factor(gradients: Gradients, factor: float) -> float:
    """Returns a factor that MXNet takes: it refuses numbers below 2**-126, so the gradients take over a part of them.

    Only where a scale near 2**126, a large batch or a hard clip come together. Otherwise nothing is touched.
    """
    if not 0 < abs(factor) < LOWEST_SCALE:
        return factor
    multiply(gradients, PART)
    return factor / PART


def is_half(array: Any) -> bool:
    """Returns whether a parameter or an array of MXNet's is kept in float16. (Its `dtype` is a name or a class.)"""
    return np.dtype(array.dtype) == np.float16
