"""Which hooks the user's code has: one that looks at gradients before the step must find them unscaled."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler

TORCHS = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)

BEFORE_BACKWARD, AFTER_BACKWARD = "on_before_backward", "on_after_backward"
BEFORE_STEP = "on_before_optimizer_step"
HOOKS = (BEFORE_BACKWARD, AFTER_BACKWARD, BEFORE_STEP)

CLIPPING = ("configure_gradient_clipping", "clip_gradients")
"""Methods of a module that clip."""

CLIPPING_OF_PLUGIN = ("_after_closure", "_clip_gradients", "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")
"""Methods of a plugin that clip, the outermost first."""


def overrides(instance: Any, method: str, parent: type) -> bool:
    """Returns whether `instance` has a `method` of its own, by its class or set on it as `LambdaCallback` does."""
    # At every step: Lightning's `is_overridden` takes ten times as long.
    return is_other(instance, method, getattr(parent, method))


def is_other(instance: Any, method: str, function: Any) -> bool:
    """Returns whether a `method` of `instance` is not this `function`."""
    return getattr(getattr(instance, method), "__func__", None) is not function


# As they are now: a hook that someone sets on Lightning's own class later is called too.
OF_MODULE = {name: getattr(pl.LightningModule, name) for name in (*HOOKS, *CLIPPING)}
OF_CALLBACK = {name: getattr(pl.Callback, name) for name in HOOKS}


def has_hook(model: pl.LightningModule, hook: str) -> bool:
    """Returns whether the module or a callback has a hook that is not the empty one of Lightning."""
    empty = OF_CALLBACK[hook]
    return is_other(model, hook, OF_MODULE[hook]) or any(
        [is_other(callback, hook, empty) for callback in model.trainer.callbacks]  # type: ignore[attr-defined]
    )


def calls(model: pl.LightningModule, hook: str) -> bool:
    """Returns whether it can be seen that the Trainer calls a hook: someone has it, or a profiler times it."""
    # To call the hooks of a module and a callback that have none takes as long as a rule for the scale.
    return is_profiled(model) or has_hook(model, hook)


def is_profiled(model: pl.LightningModule) -> bool:
    """Returns whether a profiler times the hooks."""
    return type(model.trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]


def clips_itself(model: pl.LightningModule) -> bool:
    """Returns whether the module clips in its own way, and may look at gradients that are clipped."""
    return any([is_other(model, method, OF_MODULE[method]) for method in CLIPPING])


def replaces_clipping(plugin: Precision, parent: type[Precision]) -> bool:
    """Returns whether gradients are clipped by a function of the user's, which must then be called.

    It may be a method of a class derived from `parent`, or stand in for torch's function, as one that records norms.
    """
    return (
        any([overrides(plugin, method, parent) for method in CLIPPING_OF_PLUGIN])
        or (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_) != TORCHS
    )
