"""The ways in which `GradScaler.step` applies an optimizer's gradients: in a fused kernel, behind a gate, clipped.

Each returns what the optimizer's `step` returned, and sets the scaler's `last`. And the way of `unscale_and_clip_`.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.torch.drop_in import checked, refusals, stepped
from gradscale.torch.drop_in.clip import Clip
from gradscale.torch.drop_in.unscale import gradients_of, note_unscaled
from gradscale.torch.step import apply
from gradscale.torch.step.host_copy import host_value
from gradscale.torch.step.measure import merged_flag

if TYPE_CHECKING:
    from gradscale.torch.drop_in.grad_scaler import GradScaler

Optimizer = torch.optim.Optimizer


def folded(scaler: "GradScaler", optimizer: Optimizer, scale: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Steps an optimizer whose kernel divides the gradients and skips an overflow. Does not synchronize."""
    state, divisor = scaler._per_optimizer_states[id(optimizer)], None
    if state["stage"] is OptState.READY:
        refusals.refuse_divided(optimizer, scaler._divided)
        scaler._check_inf_per_device(optimizer)
        divisor = scale if scaler._multiplies else None
        if divisor is not None and state.get("sharing"):
            # The kernel writes the divided gradient back, and would divide it for each parameter that holds it.
            stepped.divide_once(optimizer, scale)
            divisor, state["stage"] = None, OptState.UNSCALED
        scaler._divided.append(optimizer)
    elif not state["found_inf_per_device"] and gradients_of(optimizer):
        raise refusals.unchecked_gradients(optimizer)
    return scaler._remembered(optimizer, scale, stepped.step_folded(optimizer, state, scale, divisor, *args, **kwargs))


def gated(scaler: "GradScaler", optimizer: Optimizer, scale: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Divides the gradients, and steps an optimizer if they are finite. Synchronizes with the device, once."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        checked.divide_for_step(scaler, optimizer, scale)
    if not state["found_inf_per_device"]:
        raise refusals.unchecked_gradients(optimizer)
    return scaler._maybe_opt_step(optimizer, state, *args, **kwargs)


def clipped(scaler: "GradScaler", optimizer: Optimizer, scale: Tensor, clip: Clip, /, *args: Any, **kwargs: Any) -> Any:
    """Does either of the two with gradients that are clipped. Synchronizes as they do."""
    state, folds = scaler._per_optimizer_states[id(optimizer)], apply.folds(optimizer)
    if state["stage"] is OptState.UNSCALED and not state["found_inf_per_device"] and gradients_of(optimizer):
        raise refusals.unchecked_gradients(optimizer)  # before they are measured, as if they were unscaled
    if state["stage"] is OptState.READY and (clip.norm is None or scaler._unscales_otherwise):
        checked.divide_for_step(scaler, optimizer, scale)
    gradients, factor = checked.measure_to_clip(scaler, optimizer, scale, clip)
    flags = state["found_inf_per_device"]
    if not flags and (gradients or not folds):
        raise refusals.unchecked_gradients(optimizer)
    divisor, overflow = None, merged_flag(list(flags.values()), scale.device)
    if factor is not None and folds and clip.value is None and not gradients.shared:
        divisor = factor.reciprocal() if host_value(overflow) == 0 else torch.where(overflow != 0, 1.0, 1.0 / factor)
    else:
        clip.edit(gradients, factor, overflow)
        # Clipped from here on: if the optimizer raises, a step that is repeated measures them again.
        state["stage"] = OptState.UNSCALED
    if not folds:
        return scaler._maybe_opt_step(optimizer, state, *args, **kwargs)
    return scaler._remembered(optimizer, scale, stepped.step_folded(optimizer, state, scale, divisor, *args, **kwargs))


def unscaled(scaler: "GradScaler", optimizer: Optimizer, scale: Tensor, clip: Clip) -> Tensor:
    """Unscales and clips the gradients by one factor, and returns their unscaled norm. Does not synchronize."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if scaler._unscales_otherwise:
        checked.divide(scaler, optimizer, scale, allow_fp16=scaler._unscales_half)
    gradients, factor = checked.measure_to_clip(scaler, optimizer, scale, clip)
    flags = state["found_inf_per_device"]
    clip.edit(gradients, factor, merged_flag(list(flags.values()), scale.device))
    note_unscaled(optimizer, state, flags, scale.device)
    return state["grad_norm"]
