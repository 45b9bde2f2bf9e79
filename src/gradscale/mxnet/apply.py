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
    product = own * factor
    # MXNet refuses an argument below 2**-126. Only a scale near 2**126 with a large batch or a small `clip_norm` gives
    # one. The gradients are then multiplied by a part of it first.
    if 0 < abs(product) < LOWEST_SCALE:
        multiply(gradients, PART)
        product /= PART
    optimizer.rescale_grad = product
    try:
        update()
    finally:
        optimizer.rescale_grad = own
