"""What the user's code sees of gradients: its hooks must find them unscaled, and its loggers their norm."""

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

TORCHS = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)

CLIPPING_OF_PLUGIN = ("_after_closure", "_clip_gradients", "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")
"""Methods of a plugin that clip, the outermost first."""


def looks_before_step(model: pl.LightningModule) -> bool:
    """Returns whether the module or a callback has the hook before the optimizer's step."""
    hook = "on_before_optimizer_step"
    return is_overridden(hook, model, pl.LightningModule) or any(
        is_overridden(hook, callback, pl.Callback)
        for callback in model.trainer.callbacks  # type: ignore[attr-defined]
    )


def clips_itself(model: pl.LightningModule) -> bool:
    """Returns whether the module clips in its own way, and may look at gradients that are clipped."""
    return any(
        is_overridden(method, model, pl.LightningModule) for method in ("configure_gradient_clipping", "clip_gradients")
    )


def replaces_clipping(plugin: Precision, parent: type[Precision]) -> bool:
    """Returns whether gradients are clipped by a function of the user's, which must then be called.

    It may be a method of a class derived from `parent`, or stand in for torch's function, as one that records norms.
    """
    return (
        any(is_overridden(method, plugin, parent) for method in CLIPPING_OF_PLUGIN)
        or (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_) != TORCHS
    )


def norm_after_step(optimizer: Optimizable) -> Tensor | None:
    """Returns the norm of the gradients that a step has just been made on, unscaled. Does not synchronize.

    None without gradients, and where ranks hold shards of them: not every rank may log. One read of the gradients.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    plain = all(type(grad) is Tensor and grad.layout is torch.strided for grad in grads)
    return torch.nn.utils.get_total_norm(grads) if grads and plain else None
