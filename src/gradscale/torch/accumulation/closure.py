"""Closures for optimizers that evaluate the loss themselves, such as LBFGS and SAM."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradscale.torch.step.result import StepResult

RETRIES = 8
"""Lower scales tried per evaluation. These optimizers synchronize for the loss anyway, and need a gradient."""


def holder_of(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Returns an optimizer that only holds the modules' parameters, and is never stepped."""
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
    by the scale. If no scale helps, the gradients are zero: the optimizer then finds a stationary point. `backward`
    scales the loss that `evaluate` returns, and `settle` unscales the gradients and updates the scale.
    """

    def closure() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss = evaluate()
            backward(loss)
        if settle().skipped():
            # The optimizer computes with the gradients in any case, and inf or NaN would reach its state.
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)  # not always of the parameter's own type
        return loss.detach()

    return closure
