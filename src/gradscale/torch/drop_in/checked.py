"""An optimizer's gradients, checked together with other ranks: divided, left as they are, or measured for a clip."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.torch.drop_in import refusals, unscale
from gradscale.torch.drop_in.clip import Clip
from gradscale.torch.drop_in.ranks import Flags
from gradscale.torch.drop_in.update import measure_for, reads_amax_beside_norm, sizing_policy
from gradscale.torch.step.apply import takes_gate
from gradscale.torch.step.gradients import Gradients, collect

if TYPE_CHECKING:
    from gradscale.torch.drop_in.grad_scaler import GradScaler

Optimizer = torch.optim.Optimizer


def divide(scaler: "GradScaler", optimizer: Optimizer, scale: Tensor, *, allow_fp16: bool) -> None:
    """Divides the gradients by the scale that made them, and notes whether they were finite and still are."""
    state = scaler._per_optimizer_states[id(optimizer)]

    def divided() -> Flags:
        refusals.refuse_divided(optimizer, scaler._divided)
        gradients, policy = unscale.gradients_of(optimizer), sizing_policy(scaler._rule)
        if policy is not None:
            state["sizes"] = measure_for(policy, gradients, scale)
        # torch takes the inverse in float64, which not every device has. In float32 it is correctly rounded too,
        # and exact for powers of two.
        factor = scale.reciprocal()
        if scaler._unscales_otherwise:
            flags = scaler._unscale_grads_(optimizer, factor, torch.zeros_like(scale), allow_fp16)
        else:
            flags = scaler._divide(optimizer, gradients, factor, None, allow_fp16)
        return unscale.still_finite(optimizer, flags, scale, scaler._bound)

    flags = scaler._ranks.agree(optimizer, state, scaler._steps.losses, scale, divided)
    unscale.note_unscaled(optimizer, state, flags, scale.device)
    scaler._divided.append(optimizer)


def divide_for_step(scaler: "GradScaler", optimizer: Optimizer, scale: Tensor) -> None:
    """Does the same for `step`: of an optimizer that keeps masters, FP16 gradients too."""
    divide(scaler, optimizer, scale, allow_fp16=scaler._unscales_half or takes_gate(optimizer))


def check(scaler: "GradScaler", optimizer: Optimizer, scale: Tensor) -> Flags:
    """Returns, per device, whether the gradients are not finite, or would not be once divided, and notes it."""
    state = scaler._per_optimizer_states[id(optimizer)]

    def checked() -> Flags:
        gradients, state["sharing"] = unscale.gradients_and_sharing(optimizer)
        own, policy = getattr(optimizer, "grad_scale", None), sizing_policy(scaler._rule)
        return unscale.check_scaled(gradients, own, state, scale, scaler._bound, policy)

    state["found_inf_per_device"] = scaler._ranks.agree(optimizer, state, scaler._steps.losses, scale, checked)
    return state["found_inf_per_device"]


def measure_to_clip(
    scaler: "GradScaler", optimizer: Optimizer, scale: Tensor, clip: Clip
) -> tuple[Gradients, Tensor | None]:
    """Returns the gradients and what they must be multiplied by, and notes whether their norm is finite.

    None if the norm is not bounded: they are unscaled then.
    """
    if clip.norm is None:
        return collect([optimizer]), None
    state = scaler._per_optimizer_states[id(optimizer)]
    scaled = state["stage"] is OptState.READY
    divisor = scale if scaled else torch.ones_like(scale)
    found: dict[str, Any] = {}

    def measured() -> Flags:
        gradients, own = collect([optimizer]), getattr(optimizer, "grad_scale", None)
        if scaled:
            _refuse_to_clip(scaler, optimizer, gradients)
        grows = own is not None or (scaled and scaler._bound.may_be_below_one(scale))
        policy = sizing_policy(scaler._rule) if scaled else None
        total = divisor if own is None else divisor * own
        merges = scaler._updated is not None and scaler._updated.start is not None
        amax = scaled and reads_amax_beside_norm(scaler._rule, merges=merges)
        return unscale.check_norm(gradients, found, total, grows=grows, policy=policy, amax=amax, scale=scale)

    flags = scaler._ranks.agree(optimizer, found, scaler._steps.losses, scale, measured)
    if scaled:
        scaler._divided.append(optimizer)
    gradients = found.pop("norm").gradients
    unscale.note_norm(state, found, flags)
    return gradients, clip.factor(divisor, found["grad_norm"])


def _refuse_to_clip(scaler: "GradScaler", optimizer: Optimizer, gradients: Gradients) -> None:
    """Raises if scaled gradients may not be divided: another optimizer has, or they are FP16."""
    refusals.refuse_divided(optimizer, scaler._divided)
    if scaler._multiplies and not (scaler._unscales_half or takes_gate(optimizer)):
        refusals.refuse_half(optimizer, gradients.values)
