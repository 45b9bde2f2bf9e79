"""The scaler of both plugins: made from a policy or given, and asked what it has done with an optimizer."""

import warnings
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.amp.grad_scaler import OptState

from gradscale.peers.specs import as_policy
from gradscale.policies.contract import Policy
from gradscale.policies.static import CheckOnly, NoScaling
from gradscale.torch import GradScaler

AnyPrecision = Literal["16-mixed", "bf16-mixed"]
FP16: AnyPrecision = "16-mixed"
BF16: AnyPrecision = "bf16-mixed"

AUTO = "auto"

OTHER_PRECISIONS: frozenset[Any] = frozenset(
    {16, 32, 64, "16", "bf16", "32", "64", "16-true", "bf16-true", "32-true", "64-true"}
)
"""What `Trainer(precision=...)` takes besides. No policy has such a name."""


class ScalerRefused(MisconfigurationException, ValueError):
    """A scaler was given for BF16. Lightning raises the one in a `Trainer`, and the other in a `Fabric`."""


def policy_and_precision(first: Policy | str, precision: AnyPrecision | None) -> tuple[Policy | str, AnyPrecision]:
    """Returns the policy and the precision of a plugin whose first argument is either of them.

    Lightning's own classes take the precision there, and what is written for them must mean the same here.

    Raises:
        ValueError: both arguments are precisions and differ, or the first is one that is not mixed.
    """
    if first in (FP16, BF16):
        if precision not in (None, first):
            raise ValueError(
                f"The precision is given twice. Received: {first!r} and precision={precision!r}. Give one of them."
            )
        return AUTO, first  # type: ignore[return-value]
    if isinstance(first, int | str) and first in OTHER_PRECISIONS:
        # The sentence of Lightning's classes, by which code may know it.
        raise ValueError(
            f"Passed `MixedPrecision(precision={first!r})`. Precision must be '16-mixed' or 'bf16-mixed', which may "
            "be the first argument, as in Lightning's own class. In its place may stand a policy."
        )
    return first, precision or FP16


def scaler_of(policy: Policy | str, scaler: Any, precision: AnyPrecision, device: str | None) -> Any:
    """Returns the scaler of a plugin: the one given, or one with the policy.

    For BF16 None, unless the policy is `CheckOnly`.

    Raises:
        ValueError: both are given, or one that scales for BF16.
    """
    if scaler is not None and policy != AUTO:
        raise ValueError(
            f"`policy` and `scaler` exclude each other. Received: policy={policy!r} and a scaler. "
            "Make the scaler with the policy: `GradScaler(policy=...)`."
        )
    if scaler is not None:
        if precision == BF16:
            raise ScalerRefused(f"`precision='bf16-mixed'` does not use a scaler, found {scaler}.")
        if not isinstance(scaler, GradScaler):
            warnings.warn(
                f"The scaler is a {type(scaler).__module__}.{type(scaler).__qualname__}, and the plugin does with it "
                "what Lightning's own does: no clipping with fused optimizers, schedules that advance on a skip, no "
                "metrics. For these pass a `gradscale.torch.GradScaler`, which loads its state.",
                stacklevel=3,
            )
        return scaler
    if precision == BF16 and not _checks(policy):
        return None
    # Where the device is not known yet, the CPU: a type that is always there. The first loss says where the scale is.
    return GradScaler(device if isinstance(device, str) else "cpu", policy=as_policy(policy))


def _checks(policy: Policy | str) -> bool:
    """Returns whether a run in BF16 is given a scaler, which then skips steps that are not finite and scales nothing.

    Raises:
        ValueError: the policy would scale.
    """
    chosen = None if policy == AUTO else as_policy(policy)
    if chosen is None or isinstance(chosen, NoScaling):
        return False
    if not isinstance(chosen, CheckOnly):
        raise ValueError(
            "BF16 has the range of float32 and needs no loss scaling. "
            f"Received: precision='bf16-mixed' and policy={policy!r}. Leave the policy out, or pass `CheckOnly()` to "
            "skip steps whose gradients are inf or NaN."
        )
    return True


def is_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's gradients have been unscaled since its last step, or were never scaled.

    Not those that were made anew since then: `unscale_` raises where a step was left out.
    """
    if not scaler.is_enabled():
        return True
    state: dict[str, Any] | None = scaler._per_optimizer_states.get(id(optimizer))
    return state is not None and state["stage"] is OptState.UNSCALED and state.get("groups") != 0
