"""Advice on whether a run needs a scaler, and warnings of dtypes that are likely to be a mistake."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradscale.explain import scaler_warning, scaling_advice
from gradscale.formats import FP16
from gradscale.policies.static import multiplies
from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.masters import MasterWeights
from gradscale.torch.precision.compute_dtypes import ModuleDtype, dtype_names
from gradscale.torch.precision.lost_eps import lost_eps
from gradscale.torch.precision.weight_cast import NORMS
from gradscale.torch.step.gradients import parameters_of

Optimizer = torch.optim.Optimizer

ADD_SCALER = "Train it with `LossScaler(model)`, or use BF16."
REMOVE_SCALER = "Use `LossScaler(model, NoScaling())` or none."


def advice(modules: Sequence[ModuleDtype], optimizers: Sequence[Optimizer], scaler: Any) -> tuple[str, list[str]]:
    """Returns whether a scaler is needed and why, and warnings of likely mistakes."""
    trained = {
        weight.dtype for each in modules for weight in each.module.parameters(recurse=False) if weight.requires_grad
    }
    scaling = scaling_advice({each.compute_dtype for each in modules} | set(map(dtype_names, trained)))
    found = [
        scaler_warning(scaling, scales=_scales(scaler), add=ADD_SCALER, remove=REMOVE_SCALER),
        _half_norms(modules),
        *(check(optimizer) for optimizer in optimizers for check in (_lost_updates, _vanishing_moments)),
    ]
    return scaling, [warning for warning in found if warning]


def _scales(scaler: Any) -> bool:
    """Returns whether `scaler`, a `LossScaler` or a `GradScaler` or None, multiplies losses by a scale."""
    if scaler is None:
        return False
    enabled: Callable[[], bool] | None = getattr(scaler, "is_enabled", None)
    return multiplies(scaler.policy) if enabled is None else enabled() and getattr(scaler, "_multiplies", True)


def _half_norms(modules: Sequence[ModuleDtype]) -> str | None:
    norms = [each for each in modules if isinstance(each.module, NORMS)]
    half = [each for each in norms if _half(each.module.parameters(recurse=False)) or _half_statistics(each.module)]
    if not half:
        return None
    return (
        f"{len(half)} norm layers store weights or statistics in half precision, such as {half[0].name!r}: small "
        "changes of them are lost. Keep them float32 with `keep_norm_fp32=True`."
    )


def _half_statistics(module: torch.nn.Module) -> bool:
    """Returns whether a norm layer, frozen or without weights, still updates half-precision statistics."""
    return module.training and any(buffer.dtype in HALF_DTYPES for buffer in module.buffers(recurse=False))


def _lost_updates(optimizer: Optimizer) -> str | None:
    half = _half(parameters_of([optimizer]))
    if isinstance(optimizer, MasterWeights) or not half:
        return None
    return (
        f"{type(optimizer).__name__} updates {len(half)} half-precision parameters with no master weights: updates "
        "below half a unit in the last place are lost. Use `MasterWeights(optimizer)`, or float32 weights under "
        "autocast."
    )


def _vanishing_moments(optimizer: Optimizer) -> str | None:
    if isinstance(optimizer, MasterWeights):
        return None
    eps = lost_eps(optimizer)
    if eps is None:
        return None
    return (
        f"{type(optimizer).__name__} keeps squares of gradients in FP16. Those below {FP16.smallest_subnormal:.1e} are "
        f"0, and it divides by eps={eps:g} alone, or by 0 where that is rounded to FP16 too. Use "
        "`MasterWeights(optimizer)`, or a larger `eps`."
    )


def _half(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad and tensor.dtype in HALF_DTYPES]
