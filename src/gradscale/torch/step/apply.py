"""Stage four, apply: hands the decided factor and gate to the optimizers, inside their own kernels where they can."""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.kernels.torch import tensor_groups
from gradscale.torch.step.gradients import keeps_masters, share_parameters
from gradscale.torch.step.host_copy import host_value

if TYPE_CHECKING:
    from gradscale.torch.step.plan import StepPlan

Optimizer = torch.optim.Optimizer

UNGATED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Fused optimizers that take a `grad_scale` without a `found_inf`."""


def folds(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's kernel takes `grad_scale` and `found_inf`, so that no host read is needed.

    Every group must be fused: one that was added without refuses the two. Fused SGD with dampening cannot be gated by
    its kernel before its momentum exists: a skipped first step would leave the buffer uninitialised, and a buffer of
    zeros would not be what the first step makes. One that keeps masters takes care of all that itself.
    """
    return takes_gate(optimizer) and not any(
        group.get("fused") is False or _lacks_dampened_momentum(optimizer, group)
        for group in (() if keeps_masters(optimizer) else optimizer.param_groups)
    )


def takes_gate(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer says that it handles scaling, by the two attributes and not by an argument."""
    return _handles_scaling(optimizer) and not _has_argument(type(optimizer), "grad_scaler")


def takes_scaler(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer handles scaling by a `grad_scaler` argument of `step`: torch's older contract."""
    return _handles_scaling(optimizer) and _has_argument(type(optimizer), "grad_scaler")


def _handles_scaling(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer itself says that it handles scaling.

    A wrapper that looks up on the optimizer inside what it does not have would keep the two attributes to itself, and
    the kernel would step on gradients that nobody has divided or checked.
    """
    flag = "_step_supports_amp_scaling"
    return getattr(optimizer, flag, False) and (flag in vars(optimizer) or hasattr(type(optimizer), flag))


@cache
def _has_argument(kind: type[Optimizer], name: str) -> bool:
    return name in inspect.signature(kind.step).parameters


def step_folded(optimizer: Optimizer, divisor: Tensor | None, skip: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs the optimizer's step with `divisor` and `skip` folded into its kernel, and returns what it does.

    Does not synchronize with the device.

    Args:
        optimizer: one for which `folds` holds.
        divisor: what the kernel divides the gradients by, a 0-d float32; None leaves them as they are.
        skip: 1.0 leaves weights and state alone, 0.0 updates them. No other value: fused kernels test for exactly 1.
        *args: passed on to `optimizer.step`.
        **kwargs: passed on to `optimizer.step`.
    """
    _create_momentum(optimizer)
    users_own = getattr(optimizer, "grad_scale", None)
    if users_own is not None:
        divisor = users_own if divisor is None else divisor * users_own
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = None if _known_to_apply(optimizer, skip) else skip  # type: ignore[attr-defined]
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]


def _known_to_apply(optimizer: Optimizer, skip: Tensor) -> bool:
    """Returns whether the kernel needs no gate, because the gate is in host memory, and open.

    A gate makes Adam and Adagrad take back the step they have counted, for every parameter: with many small ones that
    costs as much as to read the gradients. Only torch's own classes are known to do without one.
    """
    return type(optimizer) in UNGATED and host_value(skip) == 0.0


def apply(plan: "StepPlan", applied: Tensor, factor: Tensor) -> bool | None:
    """Updates every optimizer of the plan with its gradients times `factor`, or none, as `applied` says.

    Synchronizes with the device only if one of the optimizers does not fold, and then once for all of them. Returns
    whether they were updated where that is known by then, and else None.

    Args:
        plan: has the optimizers, their gradients and the bound on every element, which costs a pass of its own.
        applied: the gate, a 0-d bool.
        factor: what unscales and clips, a 0-d float32. The gradients of a plan that divides have it already.
    """
    optimizers, gradients, clip_value = plan.optimizers, plan.gradients, plan.clip_value
    divisor = None if plan.divides else torch.where(applied, 1.0 / factor, 1.0)
    if divisor is not None and (clip_value is not None or share_parameters(optimizers)):
        # Two kernels that share a parameter would each divide its gradient.
        multiply(gradients.values, torch.where(applied, factor, 1.0))
        divisor = None
    if clip_value is not None:
        clamp(gradients.values, torch.where(applied, torch.full_like(factor, clip_value), torch.inf))
    waiting = [optimizer for optimizer in optimizers if optimizer not in plan.folding]
    go = bool(applied) if waiting else None
    if go and divisor is not None:
        multiply(gradients.owned_by(waiting).values, factor)
    skip = (~applied).float()
    for optimizer in optimizers:
        if optimizer in plan.folding:
            step_folded(optimizer, divisor, skip)
        elif go:
            optimizer.step()
        else:
            hold(optimizer)
    return go


def hold(optimizer: Optimizer) -> None:
    """Leaves the optimizer as it is, and keeps torch's schedulers from warning that its `step` was never called."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies every gradient in place by `factor`: one pass. FP16 gradients go through float32 arithmetic."""
    for group in tensor_groups(gradients):
        local = factor.to(group.device, non_blocking=True)
        torch._foreach_mul_(group.tensors, local)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def clamp(gradients: Sequence[Tensor], bound: Tensor) -> None:
    """Clamps every gradient element in place to [-bound, bound]; the two parts of a complex one each for itself."""
    for group in tensor_groups(gradients):
        local = bound.to(group.device, group.dtype, non_blocking=True)
        for grad in group.tensors:
            grad.clamp_(-local, local)


def _create_momentum(optimizer: Optimizer) -> None:
    """Gives fused SGD its momentum buffers before its first step.

    torch 2.13 allocates them uninitialised and lets the kernel fill them, which a skipped step never does. Zeros are
    exact where there is no dampening: 0 * momentum + grad is what the first step makes.
    """
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
