"""Whether the user's code looks at gradients between the backward pass and the step: it must find them unscaled."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision

TORCHS = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)

BEFORE_STEP = "on_before_optimizer_step"
CLIPPING = "configure_gradient_clipping"


def overrides(instance: Any, method: str, parent: type) -> bool:
    """Returns whether `instance` has a `method` of its own, by its class or set on it as `LambdaCallback` does."""
    # At every step: Lightning's `is_overridden` takes ten times as long.
    return getattr(getattr(instance, method), "__func__", None) is not getattr(parent, method)


def reads_gradients(model: pl.LightningModule) -> bool:
    """Returns whether the module or a callback has a hook that is given unscaled gradients before the step."""
    return (
        overrides(model, BEFORE_STEP, pl.LightningModule)
        or clips_itself(model)
        or any(overrides(callback, BEFORE_STEP, pl.Callback) for callback in model.trainer.callbacks)  # type: ignore[attr-defined]
    )


def clips_itself(model: pl.LightningModule) -> bool:
    """Returns whether the module clips in its own way, and may look at gradients that are clipped."""
    return overrides(model, CLIPPING, pl.LightningModule)


def replaces_clipping(plugin: Precision) -> bool:
    """Returns whether gradients are clipped by a function of the user's, which must then be called.

    It may be a method of a class derived from the plugin, or stand in for torch's function, as one that records norms.
    """
    return (
        overrides(plugin, "clip_grad_by_norm", Precision)
        or overrides(plugin, "clip_grad_by_value", Precision)
        or (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_) != TORCHS
    )
