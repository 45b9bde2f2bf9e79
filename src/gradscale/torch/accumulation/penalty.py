"""`LossScaler.grad`: unscaled gradients by any tensors, outside of a step, for gradient penalties."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.accumulation.retry import AnyRank
from gradscale.torch.accumulation.window import Windows
from gradscale.torch.step.gradients import numbers_of
from gradscale.torch.step.measure import measure_sizes


def unscaled_grad(
    loss: Tensor, inputs: Tensor | Sequence[Tensor], windows: Windows, any_rank: AnyRank, kwargs: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the scaled loss divided by the scale, and notes an overflow of them in the open window.

    Does not synchronize with the device, except for gradients that are DTensors. `kwargs` are those of
    `torch.autograd.grad`.
    """
    window = windows.get(loss.device)
    # A loss that is not finite counts only if one is made from its gradients and differentiated in turn.
    grads = torch.autograd.grad(window.scaled(loss, counts=False), inputs, **kwargs)
    window = windows.get(loss.device)  # another one, if the batch of the first was abandoned
    unscaled = tuple(None if grad is None else window.unscale(grad) for grad in grads)
    present = [numbers_of(grad.detach()) for grad in unscaled if grad is not None]
    finite = torch.isfinite(measure_sizes(present, window.scale.device).total)
    overflowed = ~finite & window.is_finite(loss)
    if any(hasattr(grad, "to_local") for grad in unscaled):
        # One rank's shard has overflowed, and a loss made from all of them is then not finite on every rank.
        overflowed = torch.full_like(overflowed, any_rank(overflowed.reshape(1))[0])
    window.note_overflow(overflowed)
    return unscaled
