"""Whether the user's code looks at gradients between the backward pass and the step: it must find them unscaled."""

from typing import Any

import lightning.pytorch as pl

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
