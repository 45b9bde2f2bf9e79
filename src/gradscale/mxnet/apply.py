"""Apply: the optimizer multiplies gradients by `rescale_grad` anyway, and the factor of the step joins it."""

from collections.abc import Callable
from typing import Any

from gradscale.mxnet.gradients import Gradients, multiply
from gradscale.policies.checks import LOWEST_SCALE

PART = 2.0**-60
"""What gradients are multiplied by where a factor is too small for MXNet."""


def apply(gradients: Gradients, optimizer: Any, factor: float, update: Callable[[], None]) -> None:
    """Updates the weights with gradients times `factor`. Does not read or write the gradients itself.

    Args:
        gradients: all that are applied.
        optimizer: its `rescale_grad` is multiplied by the factor for this update.
        factor: unscaling and clipping in one number.
        update: the trainer's own update.
    """
    own = optimizer.rescale_grad
    optimizer.rescale_grad = _normal(gradients, own * factor)
    try:
        update()
    finally:
        optimizer.rescale_grad = own


def _normal(gradients: Gradients, factor: float) -> float:
    """Returns a factor that MXNet takes. It refuses numbers below 2**-126: then the gradients are multiplied by a part.

    That happens only where a scale near 2**126, a large batch or a hard clip come together.
    """
    if not 0 < abs(factor) < LOWEST_SCALE:
        return factor
    multiply(gradients, PART)
    return factor / PART
