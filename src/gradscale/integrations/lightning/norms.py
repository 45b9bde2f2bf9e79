"""The norm of gradients that nothing has measured, for the loggers."""

import torch
from lightning.fabric.utilities.types import Optimizable
from torch import Tensor


def norm_after_step(optimizer: Optimizable) -> Tensor | None:
    """Returns the norm of the gradients that a step has just been made on, unscaled. Does not synchronize.

    None without gradients, and where ranks hold shards of them: not every rank may log. One read of the gradients.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    plain = all(type(grad) is Tensor and grad.layout is torch.strided for grad in grads)
    return torch.nn.utils.get_total_norm(grads) if grads and plain else None
