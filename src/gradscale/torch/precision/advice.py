"""Whether a run needs a scaler, and what about its precisions is likely to be a mistake."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradscale.formats import FP16
from gradscale.torch.masters import MasterWeights
from gradscale.torch.precision.compute_dtypes import Part
from gradscale.torch.precision.levels import HALVES
from gradscale.torch.precision.weight_cast import NORMS
from gradscale.torch.step.gradients import parameters_of

Optimizer = torch.optim.Optimizer

NEEDED = (
    f"needed. FP16 holds nothing below {FP16.smallest_subnormal:.1e} and nothing above {FP16.max:g}: without one, "
    "small gradients vanish."
)
NOT_NEEDED_BF16 = "not needed. BF16 has the range of float32: gradients neither vanish nor overflow for want of it."
NOT_NEEDED = "not needed. Everything runs in float32."


def advice(parts: Sequence[Part], optimizers: Sequence[Optimizer], scaler: Any) -> tuple[str, list[str]]:
    """Returns whether a scaler is needed and why, and what is likely to be a mistake.

    Args:
        parts: the modules, and what they run in.
        optimizers: those of their parameters; with none, nothing is said of weights that lose updates.
        scaler: the scaler, or None.
    """
    computed = {part.runs for part in parts} | {weight_type for part in parts for weight_type in _trained(part)}
    if "float16" in computed:
        scaling = NEEDED
    else:
        scaling = NOT_NEEDED_BF16 if "bfloat16" in computed else NOT_NEEDED
    found = [
        _scaler_missing(scaling, scaler),
        _scaler_idle(scaling, scaler),
        _half_norms(parts),
        *(check(optimizer) for optimizer in optimizers for check in (_lost_updates, _vanishing_moments)),
    ]
    return scaling, [mistake for mistake in found if mistake]


def scales(scaler: Any) -> bool:
    """Returns whether `scaler`, a `LossScaler` or a `GradScaler` or None, multiplies losses at all."""
    if scaler is None:
        return False
    enabled: Callable[[], bool] | None = getattr(scaler, "is_enabled", None)
    return bool(scaler.policy.needs) if enabled is None else enabled()


def _trained(part: Part) -> Iterable[str]:
    weights = part.module.parameters(recurse=False)
    return {str(weight.dtype).removeprefix("torch.") for weight in weights if weight.requires_grad}


def _scaler_missing(scaling: str, scaler: Any) -> str | None:
    if scaling is not NEEDED or scales(scaler):
        return None
    return (
        "FP16 runs with no scaler: small gradients vanish, and the model stops to learn. Train it with "
        "`LossScaler(model)`, or use BF16."
    )


def _scaler_idle(scaling: str, scaler: Any) -> str | None:
    if scaling is NEEDED or not scales(scaler):
        return None
    return (
        "A scaler runs for nothing: there is no FP16 here, and it reads every gradient at every step. "
        "Use `LossScaler(model, NoScaling())` or none."
    )


def _half_norms(parts: Sequence[Part]) -> str | None:
    halves = [part for part in parts if isinstance(part.module, NORMS) and _half(part.module.parameters(recurse=False))]
    if not halves:
        return None
    return (
        f"{len(halves)} norm layers store weights and statistics in half precision, such as {halves[0].name!r}: small "
        "changes of them are lost. Keep them float32 with `keep_norm_fp32=True`."
    )


def _lost_updates(optimizer: Optimizer) -> str | None:
    halves = _half(parameters_of([optimizer]))
    if isinstance(optimizer, MasterWeights) or not halves:
        return None
    return (
        f"{type(optimizer).__name__} updates {len(halves)} half-precision parameters with no master weights: updates "
        "below half a unit in the last place are lost. Use `MasterWeights(optimizer)`, or float32 weights under "
        "autocast."
    )


def _vanishing_moments(optimizer: Optimizer) -> str | None:
    if isinstance(optimizer, MasterWeights):
        return None
    for group in optimizer.param_groups:
        fp16 = any(parameter.dtype is torch.float16 for parameter in group["params"])
        if fp16 and group.get("eps", 1.0) < FP16.smallest_subnormal:
            return (
                f"{type(optimizer).__name__} keeps squares of gradients in FP16. Those below "
                f"{FP16.smallest_subnormal:.1e} are 0, and it divides by eps={group['eps']:g} alone, or by 0 where "
                "that is rounded to FP16 too. Use `MasterWeights(optimizer)`, or a larger `eps`."
            )
    return None


def _half(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad and tensor.dtype in HALVES]
