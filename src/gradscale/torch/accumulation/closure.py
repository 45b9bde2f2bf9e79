"""Closures for optimizers that evaluate the loss themselves: LBFGS, SAM and their kind."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradscale.torch.step.result import StepResult

RETRIES = 8
"""Lower scales tried per evaluation. These optimizers synchronize for the loss anyway, and need a gradient."""


def holder_of(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Returns something that holds the modules' parameters as an optimizer does, and is never stepped."""
    if not modules:
        raise ValueError("`closure` needs parameters. Build the scaler as `LossScaler(model)` or pass the optimizer.")
    parameters = (parameter for module in modules for parameter in module.parameters())
    return torch.optim.SGD({id(parameter): parameter for parameter in parameters}.values())


def make_closure(
    evaluate: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    backward: Callable[[Tensor], None],
    settle: Callable[[], StepResult],
) -> Callable[[], Tensor]:
    """Returns a closure that computes the loss and leaves unscaled gradients in `.grad`.

    Each call clears the gradients, runs `evaluate`, the backward pass (at lower scales while it overflows), and divides
    by the scale. Where no scale helps, the gradients are zeroed: the optimizer then sees a stationary point.

    Args:
        evaluate: runs the forward pass and returns the loss, unscaled.
        parameters: those the optimizer updates.
        backward: scales a loss and runs its backward pass.
        settle: unscales the gradients, moves the scale and returns the result.
    """

    def closure() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss = evaluate()
            backward(loss)
        if settle().skipped():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter)
        return loss.detach()

    return closure
