"""The scaler of both plugins: made from a policy or given, and asked what it has done with an optimizer."""

from typing import Any, Literal

import torch
from torch.amp.grad_scaler import OptState

from gradscale.policies.contract import Policy
from gradscale.torch import GradScaler

AnyPrecision = Literal["16-mixed", "bf16-mixed"]

AUTO = "auto"


def scaler_of(
    policy: Policy | str, scaler: GradScaler | None, precision: AnyPrecision, device: str | None
) -> GradScaler | None:
    """Returns the scaler of a plugin: the one given, or one with the policy; None for BF16, which needs none."""
    if policy in ("16-mixed", "bf16-mixed"):
        raise ValueError(
            "The first argument is the policy, and not the precision as in Lightning's own class. "
            f"Received: policy={policy!r}. Pass `precision={policy!r}`, or nothing for FP16."
        )
    if precision == "bf16-mixed":
        return scaler  # Lightning refuses one
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            "`scaler` must be a `gradscale.torch.GradScaler`, which clips and reports skipped steps. "
            f"Received: {type(scaler).__module__}.{type(scaler).__qualname__}. Its state can be loaded by one."
        )
    if scaler is not None and policy != AUTO:
        raise ValueError(
            f"`policy` and `scaler` exclude each other. Received: policy={policy!r} and a scaler. "
            "Make the scaler with the policy: `GradScaler(policy=...)`."
        )
    if scaler is not None:
        return scaler
    # Where the device is not known yet, the CPU: a type that is always there. The first loss says where the scale is.
    return GradScaler(device or "cpu", policy=policy)


def is_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's gradients have been unscaled since its last step, or were never scaled.

    Not those that were made anew since then: `unscale_` raises where a step was left out.
    """
    if not scaler.is_enabled():
        return True
    state: dict[str, Any] | None = scaler._per_optimizer_states.get(id(optimizer))
    return state is not None and state["stage"] is OptState.UNSCALED and not state.get("replaced")
