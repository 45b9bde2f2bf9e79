"""Stage four, apply: steps the optimizers with the decided factor and gate, in their own kernels if these take them."""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.kernels.torch import tensor_groups
from gradscale.torch.step.gradients import keeps_masters
from gradscale.torch.step.host_copy import host_value, moved

if TYPE_CHECKING:
    from gradscale.torch.step.plan import StepPlan

Optimizer = torch.optim.Optimizer

UNGATED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Fused optimizers that take a `grad_scale` without a `found_inf`."""


def folds(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's kernel takes `grad_scale` and `found_inf`, so that no host read is needed.

    Every group must be fused: torch raises an error for the two in a group that is not. An optimizer that keeps masters
    handles all of this itself.
    """
    # Fused SGD with dampening is not gated by its kernel before its momentum exists: a skipped first step leaves the
    # buffer uninitialized, and zeros in it would give (1 - dampening) * grad where the first step of SGD takes grad.
    return takes_gate(optimizer) and not any(
        group.get("fused") is False or _lacks_dampened_momentum(optimizer, group)
        for group in (() if keeps_masters(optimizer) else optimizer.param_groups)
    )


def takes_gate(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer handles scaling by the attributes `grad_scale` and `found_inf`."""
    return _handles_scaling(optimizer) and not has_argument(optimizer, "grad_scaler")


def takes_scaler(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer handles scaling by a `grad_scaler` argument of `step`: torch's older contract."""
    return _handles_scaling(optimizer) and has_argument(optimizer, "grad_scaler")


def _handles_scaling(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer itself, and not one that it wraps, declares that it handles scaling."""
    # A wrapper that forwards unknown attributes to its inner optimizer has the flag by `getattr`. The two attributes
    # would be set on the wrapper, and the inner kernel would step on scaled, unchecked gradients.
    flag = "_step_supports_amp_scaling"
    return getattr(optimizer, flag, False) and (flag in vars(optimizer) or hasattr(type(optimizer), flag))


def has_argument(optimizer: Optimizer, name: str) -> bool:
    """Returns whether the optimizer's `step` has an argument of that name."""
    return _has_argument(type(optimizer), name)


@cache
def _has_argument(kind: type[Optimizer], name: str) -> bool:
    return name in inspect.signature(kind.step).parameters


def step_folded(optimizer: Optimizer, divisor: Tensor | None, gate: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs the optimizer's step with `divisor` and `gate` folded into its kernel, and returns its result.

    `divisor` is a 0-d float32, or None to leave the gradients as they are. Without `gate`, a 0-d bool, weights and
    state are left alone. Other arguments are passed on to `optimizer.step`. Does not synchronize.
    """
    # Both must be 0-d: Adam and Adagrad raise for the shape (1,). `found_inf` must be exactly 1 to skip: with 2, which
    # a sum of the flags of two devices may be, a fused kernel steps on gradients that are inf.
    _create_momentum(optimizer)
    users_own = getattr(optimizer, "grad_scale", None)
    if users_own is not None:
        divisor = users_own if divisor is None else divisor * users_own
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = None if _known_to_apply(optimizer, gate) else (~gate).float()  # type: ignore[attr-defined]
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        # Left behind, they would divide or skip a later step that is made without a scaler.
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]


def step_unfolded(optimizer: Optimizer) -> None:
    """Runs the optimizer's step on gradients that are divided already."""
    # A copy of a fused SGD does not fold any more: torch loses the flag, and skipped steps have left zeros.
    _create_momentum(optimizer)
    optimizer.step()


def _known_to_apply(optimizer: Optimizer, gate: Tensor) -> bool:
    """Returns whether the step is known on the host to be applied, and the kernel does not need `found_inf`."""
    # Adam and Adagrad add 1 to every `step`, and then subtract `found_inf` if it is given: for many small parameters
    # that costs as much as reading the gradients. By exact type: only torch's own classes are known to do without.
    return type(optimizer) in UNGATED and bool(host_value(gate))


def apply(plan: "StepPlan", applied: Tensor, factor: Tensor, known: bool | None = None) -> bool | None:
    """Updates all optimizers of the plan with their gradients times `factor` if `applied`, a 0-d bool, is set.

    `known` is `applied`, where the host has read it already.

    Returns whether they were updated if the host knows it by then, else None. Synchronizes with the device only if one
    of the optimizers does not fold, and then once for all of them. A `clip_value` costs a pass of its own.
    """
    optimizers, gradients, clip_value = plan.optimizers, plan.gradients, plan.clip_value
    # The factor of a skipped step is 0, and its inverse inf: 1 leaves the gradients as they are.
    divisor = None if plan.divides or plan.keeps else torch.where(applied, 1.0 / factor, 1.0)
    if divisor is not None and plan.divided_first:
        multiply(gradients.owned_by(plan.divided_first).values, torch.where(applied, factor, 1.0))
    if clip_value is not None:
        clamp(gradients.values, torch.where(applied, torch.full_like(factor, clip_value), torch.inf))
    unfused = [optimizer for optimizer in optimizers if optimizer not in plan.folding]
    # Read once, before the first optimizer is stepped: all of them or none.
    go = (bool(applied) if known is None else known) if unfused else None
    if go and divisor is not None:
        rest = [optimizer for optimizer in unfused if optimizer not in plan.divided_first]
        multiply(gradients.owned_by(rest).values, factor)
    for optimizer in optimizers:
        if optimizer in plan.folding:
            step_folded(optimizer, None if optimizer in plan.divided_first else divisor, applied)
        elif go:
            step_unfolded(optimizer)
        else:
            hold(optimizer)
    return go


def hold(optimizer: Optimizer) -> None:
    """Skips the optimizer, without torch's schedulers warning that its `step` was not called."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies every gradient in place by `factor`: one pass. FP16 gradients go through float32 arithmetic."""
    for group in tensor_groups(gradients):
        # A 0-d float32 tensor, not a number: `float(factor)` would synchronize, and an FP16 factor loses 1 / scale.
        local = moved(factor, group.device)
        torch._foreach_mul_(group.tensors, local)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def clamp(gradients: Sequence[Tensor], bound: Tensor) -> None:
    """Clamps every gradient element in place to [-bound, bound]; of a complex one, each of its two parts."""
    for group in tensor_groups(gradients):
        local = moved(bound, group.device, group.dtype)
        # `_foreach_clamp_max_` takes numbers or one bound for each tensor, not a single 0-d tensor.
        for grad in group.tensors:
            grad.clamp_(-local, local)


def _create_momentum(optimizer: Optimizer) -> None:
    """Gives fused SGD its momentum buffers before its first step."""
    # torch 2.13 allocates them uninitialized for the kernel to fill, which a skipped step does not: later steps then
    # start from garbage. Zeros are exact where there is no dampening: 0 * momentum + grad is the first step's buffer.
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for parameter in _without_momentum(optimizer, group):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _lacks_dampened_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if not (isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"] and group["dampening"]):
        return False
    return bool(_without_momentum(optimizer, group))


def _without_momentum(optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    """Returns the group's parameters that have a gradient and no momentum buffer yet."""
    return [
        parameter
        for parameter in group["params"]
        if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None
    ]
