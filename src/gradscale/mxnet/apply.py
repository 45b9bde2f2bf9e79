"""Apply: the factor of the step is part of `rescale_grad`, by which the optimizer multiplies gradients anyway."""

from collections.abc import Callable
from typing import Any

from gradscale.mxnet.gradients import Gradients, multiply
from gradscale.policies.checks import LOWEST_SCALE

PART = 2.0**-60
"""What gradients are multiplied by where a factor is too small for MXNet."""


def apply(gradients: Gradients, optimizer: Any, factor: float, update: Callable[[], None]) -> None:
    """Updates the weights with gradients times `factor`, by the trainer's own `update`. Makes no pass of its own."""
    own = optimizer.rescale_grad
    optimizer.rescale_grad = _normal(gradients, own * factor)
    try:
        update()
    finally:
        optimizer.rescale_grad = own


def _normal(gradients: Gradients, factor: float) -> float:
    """Returns a factor that MXNet accepts, and multiplies the gradients by the rest if there is one."""
    # MXNet refuses an argument below 2**-126. Only a scale near 2**126 with a large batch or a small `clip_norm` gives
    # one.
    if not 0 < abs(factor) < LOWEST_SCALE:
        return factor
    multiply(gradients, PART)
    return factor / PART
