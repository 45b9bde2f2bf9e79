"""The gradients of a trainer: their parameter, their context, and whether a backward pass has written them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mxnet import autograd


class Gradient(NamedTuple):
    """One parameter's gradient on one context.

    Attributes:
        name: the parameter.
        weight: its values on the context. MXNet keeps the flag of a fresh gradient there.
        array: the gradient.
    """

    name: str
    weight: Any
    array: Any

    @property
    def fresh(self) -> bool:
        """Whether a backward pass has written the gradient since the last step."""
        return bool(self.weight._fresh_grad)

    @property
    def values(self) -> Any:
        """The gradient as a dense array; of a sparse one the rows that it holds. Shares its memory."""
        array = self.array.as_nd_ndarray()
        return array if array.stype == "default" else array.data


Gradients = Sequence[Sequence[Gradient]]
"""The gradients on each context."""


def collect(trainer: Any) -> Gradients:
    """Returns the gradients of all parameters that are trained."""
    trained = [param for param in trainer._params if param.grad_req != "null"]
    gradients = [
        [Gradient(param.name, weight, grad) for weight, grad in zip(param.list_data(), param.list_grad(), strict=True)]
        for param in trained
    ]
    return list(zip(*gradients, strict=True))


def fresh(gradients: Gradients) -> Gradients:
    """Returns those gradients that a backward pass has written since the last step."""
    return [[gradient for gradient in context if gradient.fresh] for context in gradients]


def mark_stale(gradients: Gradients) -> None:
    """Marks the gradients as used, as an update does: the next step must not apply those of a skipped one."""
    for context in gradients:
        for gradient in context:
            gradient.weight._fresh_grad = False


def multiply(gradients: Gradients, factor: float) -> None:
    """Multiplies all gradients in place, in float32 or wider: a factor like 2**-25 is zero in float16."""
    with autograd.pause():  # keeps it out of the graph if MXNet is recording
        for context in gradients:
            for gradient in context:
                array = gradient.array.as_nd_ndarray()
                wide = array.astype("float32") if is_half(array) else array
                (wide * factor).astype(array.dtype).copyto(array)


def is_half(array: Any) -> bool:
    """Returns whether a parameter or an array of MXNet's is kept in float16."""
    # Its `dtype` is a string or a numpy class, depending on how it was set.
    return np.dtype(array.dtype) == np.float16
