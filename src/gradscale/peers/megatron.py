"""Megatron-LM: `DynamicGradScaler` and `ConstantGradScaler`."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from gradscale._text import short, shown
from gradscale.peers._form import Form
from gradscale.peers._saved import Imported, Saved, settings_of, started
from gradscale.peers._settings import Backoff, Count, Float32, Growth, Whole, checked, static_as
from gradscale.peers.ladder import NO_LIMIT, Ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static

_CONFIG = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


@checked
def dynamic_grad_scaler(
    initial_scale: Float32 = 2.0**32,
    min_scale: Float32 = 1.0,
    growth_factor: Growth = 2.0,
    backoff_factor: Backoff = 0.5,
    growth_interval: Whole = 1000,
    hysteresis: Count = 2,
) -> Ladder:
    """Returns the rule of `DynamicGradScaler`: float32, with a floor and no ceiling, so that the scale can become inf.

    Only growth restores the credits, which fall below zero.
    """
    if min_scale > initial_scale:
        raise ValueError(
            "`min_scale` must not be above `initial_scale`. "
            f"Received: min_scale={min_scale!r}, initial_scale={initial_scale!r}."
        )
    # `hysteresis_tracker -= 1` has no lower bound: once spent, every overflow backs off until the next growth.
    return Ladder(
        init_scale=initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        fewest_credits=NO_LIMIT,
        floor=min_scale,
    )


constant_grad_scaler = static_as("initial_scale")


@checked
def optimizer_config(
    loss_scale: float | None = None,
    initial_loss_scale: float = 2.0**32,
    min_loss_scale: float = 1.0,
    loss_scale_window: Whole = 1000,
    hysteresis: int = 2,
) -> Ladder | Static:
    """Returns the rule that `OptimizerConfig`, or the command line, asks for: constant if `loss_scale` is given."""
    if loss_scale:  # Megatron's own test: 0 is dynamic, like None
        return constant_grad_scaler(loss_scale)
    return dynamic_grad_scaler(
        initial_loss_scale, min_loss_scale, growth_interval=loss_scale_window, hysteresis=hysteresis
    )


_FORM = Form(
    "Megatron's DynamicGradScaler",
    dynamic_grad_scaler,
    "scale",
    "growth_tracker",
    credits="hysteresis_tracker",
)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of a checkpoint, of its `optimizer`, or of the `grad_scaler` in that.

    Megatron keeps the settings in the checkpoint's `args`; without them its defaults are assumed.
    """
    policy = optimizer_config(**settings_of(mapping.get("args"), _CONFIG))
    scaler = _grad_scaler(mapping)
    if isinstance(policy, Static):
        return started(policy)
    if not scaler:
        raise ValueError(
            "Megatron saves nothing of a constant scale but the `loss_scale` in the checkpoint's `args`. Received: an "
            "empty `grad_scaler`, and no such `args`. Use preset('megatron', 'ConstantGradScaler', initial_scale=...)."
        )
    return policy, _FORM.read(scaler)[1]


def _grad_scaler(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the scaler's own mapping: of a checkpoint, of an optimizer, of chained ones, or given by itself.

    Each of chained optimizers has one, but only the first one's scale multiplies the loss.
    """
    held = mapping.get("optimizer")
    if "grad_scaler" in mapping or not isinstance(held, Mapping | Sequence):
        return cast("Mapping[str, Any]", mapping.get("grad_scaler", mapping))
    chain = cast("Sequence[Any]", [held] if isinstance(held, Mapping) else held)
    if not chain:
        raise ValueError("A chain of Megatron optimizers has at least one. Received: an empty list.")
    for optimizer in chain:
        if not isinstance(optimizer, Mapping) or "grad_scaler" not in optimizer:
            received = list(cast("Mapping[str, Any]", optimizer)) if isinstance(optimizer, Mapping) else optimizer
            raise ValueError(
                f"Megatron's FP16 optimizer saves a `grad_scaler`. Received: {shown(received)}. "
                "A run in BF16 or FP32 has none: use `NoScaling`."
            )
    scalers: list[Mapping[str, Any]] = [optimizer["grad_scaler"] for optimizer in chain]
    scales = [Saved(_FORM.what, scaler).scale("scale") for scaler in scalers if scaler]
    if len(set(scales)) > 1:
        raise ValueError(
            f"The scalers of chained optimizers must agree. Received: scales {short(scales)}. Only the first "
            "multiplies the loss; the others divided by the wrong number. To continue from it, pass `mapping[0]`."
        )
    return scalers[0]


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the `grad_scaler` of a Megatron optimizer. Its scale is a numpy array, for `torch.from_numpy`.

    The settings are not in it, and must be given to Megatron again.
    """
    written = _FORM.write(policy, state, given_again=("growth_interval", "hysteresis", "floor"))
    return written | {"scale": np.asarray([written["scale"]], np.float32)}


VARIANTS = {
    "DynamicGradScaler": dynamic_grad_scaler,
    "ConstantGradScaler": constant_grad_scaler,
    "OptimizerConfig": optimizer_config,
}
