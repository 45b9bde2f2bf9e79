"""What a step does to optimizers: the plan of it, made before anything is measured, and stage four, apply."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks as _global_pre_hooks

from gradscale.engine.decide import CLIP_EPSILON
from gradscale.engine.host import factor_on_host
from gradscale.engine.measurement import AMAX_EVERY
from gradscale.engine.packed import Packed
from gradscale.kernels.torch import tensor_groups
from gradscale.torch import host
from gradscale.torch.gradients import Gradients, keeps_masters, parameters_of
from gradscale.torch.host import Facts, Rule, filled, to_device

Optimizer = torch.optim.Optimizer

UNGATED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Fused optimizers that take a `grad_scale` without a `found_inf`."""


class StepPlan(NamedTuple):
    """What a step works on, and how.

    Attributes:
        gradients: all gradients of the optimizers, which are updated together, or not at all.
        scale: what they must be divided by, on the device: the scale of their losses, or 1 where they are divided.
        divisor: the same number on the host.
        edited: whether they are divided already, for edits by the user.
        norm: whether their norm is read.
        amax: whether their largest magnitude is read.
        finds_amax: whether the largest magnitude is known after the step: read beside a norm, or as the size itself.
        edge: magnitude above which their elements are counted; None where the policy does not need it.
        estimates_amax: whether the policy follows the largest magnitude, which a norm that is read at every step
            replaces at most steps.
        divides: whether they are divided in the pass that checks them. Only where no size is needed, no optimizer folds
            the division into its own kernel, and no finite gradient can overflow by it.
        keeps: whether they are applied as they are: the scale is always 1, and their norm is not clipped.
        grows: whether the divisor is below 1, so that a finite gradient may not be finite once divided.
        half: whether FP16 gradients are divided in FP16 by such a divisor.
        folding: the optimizers whose kernels divide the gradients and skip the update themselves.
        divided_first: the optimizers whose gradients are divided before any of them is stepped.
        edits: whether there are such, or a clip by value, or an optimizer that does not fold.
        waits: whether the host reads what was measured before the optimizers are stepped: in host memory, for an
            optimizer that does not fold, and where the divisor is below 1.
        clip_norm: bound on the norm of all gradients together, unscaled.
        clip_value: bound on the magnitude of every element, unscaled.
        kernel: the rule that the device runs, as a kernel; None where the host runs it.
    """

    gradients: Gradients
    scale: Tensor
    divisor: np.float32
    edited: bool
    norm: bool
    amax: bool
    finds_amax: bool
    edge: float | None
    estimates_amax: bool
    divides: bool
    keeps: bool
    grows: bool
    half: bool
    folding: Sequence[Optimizer]
    divided_first: Sequence[Optimizer]
    edits: bool
    waits: bool
    clip_norm: float | None = None
    clip_value: float | None = None
    kernel: Packed | None = None

    @property
    def bounds(self) -> float:
        """Both bounds in one number, which ranks compare."""
        return (self.clip_norm or 0.0) + (self.clip_value or 0.0)


def plan_step(
    rule: Rule,
    gradients: Gradients,
    scale: Tensor,
    divisor: np.float32,
    steps: int,
    *,
    edited: bool = False,
    norm: bool = False,
    sample: bool = False,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    fold: bool = True,
    divide: bool = True,
) -> StepPlan:
    """Returns the plan of a step on `gradients`. Reads no gradient and does not synchronize.

    Where a norm is read, amax is read at some steps and estimated at others.

    Args:
        rule: the rule of the scale.
        gradients: those of all optimizers.
        scale: what they must be divided by, on the device.
        divisor: the same number on the host.
        steps: how many steps the rule has followed. It chooses those that read the largest magnitude.
        edited: whether they are divided already. Their sizes were noted before the user's edits then.
        norm: read the norm for the result.
        sample: read the largest magnitude for the metrics.
        clip_norm: bound on the norm of all gradients together, unscaled.
        clip_value: bound on the magnitude of every element, unscaled.
        fold: let kernels of the optimizers divide. Not where the scaler does not step them itself, and does not wait.
        divide: divide in the pass that checks, where that can be.
    """
    optimizers, reads = gradients.optimizers, rule.reads
    norm = norm or clip_norm is not None
    follows = reads.amax and norm and not edited
    # By the number of the step alone where later estimates depend on it, so that a resumed run is bit-exact.
    amax = not edited and (steps < AMAX_EVERY or steps % AMAX_EVERY == 0 if follows else sample or reads.amax)
    edge = None if edited else reads.edge
    sizes = norm or amax or edge is not None
    grows = bool(divisor < 1.0)
    folding = [optimizer for optimizer in optimizers if fold and folds(optimizer)]
    # Fused kernels write the divided gradient back, so that two which share one would divide it twice; and the bound of
    # a clip by value is on unscaled elements.
    sharing = gradients.sharing if gradients.shared else ()
    divided_first = sharing if fold and clip_value is None else optimizers
    return StepPlan(
        gradients=gradients,
        scale=scale,
        divisor=divisor,
        edited=edited,
        norm=norm,
        amax=amax,
        finds_amax=amax or edited or (sizes and not norm),
        edge=edge,
        estimates_amax=follows,
        divides=divide and rule.multiplies and not (edited or sizes or grows or folding or clip_value is not None),
        keeps=(edited or not rule.multiplies) and clip_norm is None,
        grows=grows,
        half=grows and not all(map(keeps_masters, optimizers)),
        folding=folding,
        divided_first=divided_first,
        edits=bool(divided_first) or len(folding) < len(optimizers),
        waits=host.in_host_memory(scale.device) or grows or (fold and len(folding) < len(optimizers)),
        clip_norm=clip_norm,
        clip_value=clip_value,
    )


def folds(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's kernel takes `grad_scale` and `found_inf`, so that no host read is needed.

    Every group must be fused: torch raises an error for the two in a group that is not. An optimizer that keeps masters
    handles all of this itself. Nor may code of the user's run before the kernel, which would see scaled gradients.
    """
    kind = type(optimizer)
    if handled_by(optimizer) != "attributes" or getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return False
    # A class that declares the contract itself has a `step` that knows it; one below torch's has torch's declaration.
    own = not kind.step.__module__.startswith("torch.optim.") and not hasattr(kind, "_step_supports_amp_scaling")
    if own or _global_pre_hooks:
        return False
    if keeps_masters(optimizer):
        return True
    groups, sgd = optimizer.param_groups, isinstance(optimizer, torch.optim.SGD)
    # Fused SGD with dampening is not gated by its kernel before its momentum exists: a skipped first step leaves the
    # buffer uninitialized, and zeros in it would give (1 - dampening) * grad where the first step of SGD takes grad.
    return not any(
        group.get("fused") is False
        or (sgd and group["fused"] and group["momentum"] and group["dampening"] and _without_momentum(optimizer, group))
        for group in groups
    )


def handled_by(optimizer: Optimizer) -> Literal["attributes", "argument"] | None:
    """Returns how the optimizer itself, and not one that it wraps, declares to handle scaling; None if it does not.

    By the attributes `grad_scale` and `found_inf`, or by an argument `grad_scaler` of `step`: torch's older contract.
    """
    # A wrapper that forwards unknown attributes to its inner optimizer has the flag by `getattr`. The two attributes
    # would be set on the wrapper, and the inner kernel would step on scaled, unchecked gradients.
    flag, kind = "_step_supports_amp_scaling", type(optimizer)
    if not (getattr(optimizer, flag, False) and (flag in vars(optimizer) or hasattr(kind, flag))):
        return None
    return "argument" if has_argument(kind, "grad_scaler") else "attributes"


@cache
def has_argument(kind: type[Optimizer], name: str) -> bool:
    """Returns whether the `step` of a class of optimizers has an argument of that name."""
    return name in inspect.signature(kind.step).parameters


def step_folded(
    optimizer: Optimizer, divisor: Tensor | None, found_inf: Tensor | None, *args: Any, **kwargs: Any
) -> Any:
    """Runs the optimizer's step with `divisor` and `found_inf` folded into its kernel, and returns its result.

    `divisor` is a 0-d float32, or None to leave the gradients as they are. Where `found_inf` is 1, weights and state
    are left alone; None is 0. Other arguments are passed on to `optimizer.step`. Does not synchronize.
    """
    # Both must be 0-d: Adam and Adagrad raise for the shape (1,). `found_inf` must be exactly 1 to skip: with 2, which
    # a sum of the flags of two devices may be, a fused kernel steps on gradients that are inf.
    if isinstance(optimizer, torch.optim.SGD):
        _create_momentum(optimizer)
    users_own = getattr(optimizer, "grad_scale", None)
    if users_own is not None:
        divisor = users_own if divisor is None else divisor * users_own
    # Adam and Adagrad add 1 to every `step`, and then subtract `found_inf` if it is given: for many small parameters
    # that costs as much as reading the gradients. By exact type: only torch's own classes are known to do without.
    if found_inf is None and type(optimizer) not in UNGATED:
        device = parameters_of([optimizer])[0].device if divisor is None else divisor.device
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        # Left behind, they would divide or skip a later step that is made without a scaler.
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]


def step_unfolded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Runs the optimizer's step on gradients that are divided already, and returns its result."""
    # A copy of a fused SGD does not fold any more: torch loses the flag, and skipped steps have left zeros.
    if isinstance(optimizer, torch.optim.SGD):
        _create_momentum(optimizer)
    return optimizer.step(*args, **kwargs)


class Gate(NamedTuple):
    """The decision of a step for its optimizers, the same on every device and rank.

    Attributes:
        applied: whether the step is applied; None where only the device knows.
        found_inf: 1 if it is not, else 0, a 0-d float32 on the device; None where the host knows.
        factor: what every gradient is multiplied by, to unscale and clip it; None if they stay as they are.
        divisor: its inverse, for kernels that divide; None likewise.
    """

    applied: bool | None
    found_inf: Tensor | None
    factor: Tensor | None
    divisor: Tensor | None


def decide(plan: StepPlan, facts: Facts, applied: bool | None, found_inf: Callable[[], Tensor] | None = None) -> Gate:
    """Returns the decision of a step, and whether it is `applied`; None where only the device knows it.

    There `found_inf` returns 1 if it is not, else 0, and the norm by which gradients are clipped is that on the device.
    """
    device, divisor = plan.scale.device, plan.scale
    if applied is None:
        assert found_inf is not None  # noqa: S101
        flag = found_inf()
        if plan.keeps or plan.divides:
            return Gate(None, flag, None, None)
        if facts.divisor is not None:
            return Gate(None, flag, facts.divisor.reciprocal() if plan.divided_first else None, facts.divisor)
        unscale = 1.0 / float(plan.divisor)
        if plan.clip_norm is None:
            return Gate(None, flag, filled(unscale, device) if plan.divided_first else None, divisor)
        clip = (plan.clip_norm / (facts.norm() + CLIP_EPSILON)).clamp(max=1.0)  # type: ignore[misc]
        return Gate(None, flag, clip * unscale if plan.divided_first else None, divisor / clip)
    if not applied or plan.divides or plan.keeps:
        return Gate(applied, None, None, None)
    factor = 1.0 / float(plan.divisor)  # rounded to float32, the same as the quotient there
    if plan.clip_norm is not None:
        with np.errstate(all="ignore"):
            factor = factor_on_host(plan.divisor, facts.seen().norm, np.float32(plan.clip_norm))
            divisor = filled(float(np.float32(1.0) / factor), device)
    return Gate(True, None, filled(float(factor), device) if plan.edits else None, divisor)


def apply(plan: StepPlan, gate: Gate, *args: Any, **kwargs: Any) -> Any:
    """Updates all optimizers of the plan with gradients that `edit` has seen, or none of them, as the gate says.

    Further arguments are passed on to `optimizer.step`. Returns what the last of them returned; None if the host skips
    the step. Does not synchronize.
    """
    optimizers = plan.gradients.optimizers
    if gate.applied is False:
        for optimizer in optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch's schedulers warn of no `step`
        return None
    returned = None
    for optimizer in optimizers:
        if optimizer in plan.folding:
            divisor = None if optimizer in plan.divided_first else gate.divisor
            returned = step_folded(optimizer, divisor, gate.found_inf, *args, **kwargs)
        else:
            returned = step_unfolded(optimizer, *args, **kwargs)
    return returned


def edit(plan: StepPlan, gate: Gate) -> None:
    """Unscales and clips the gradients that no kernel of an optimizer does, unless the gate skips the step.

    Does not synchronize. A `clip_value` costs a pass of its own.
    """
    if gate.applied is False:
        return
    gradients, factor, open_gate = plan.gradients, gate.factor, None if gate.found_inf is None else gate.found_inf == 0
    optimizers = gradients.optimizers
    divided = [each for each in optimizers if each in plan.divided_first or each not in plan.folding]
    if factor is not None and divided:
        owned = gradients if len(divided) == len(optimizers) else gradients.owned_by(divided)
        # The factor is NaN where the norm is.
        multiply(owned.values, factor if open_gate is None else torch.where(open_gate, factor, 1.0))
    if plan.clip_value is not None:
        bound = filled(plan.clip_value, plan.scale.device)
        clamp(gradients.values, bound if open_gate is None else torch.where(open_gate, bound, torch.inf))


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies every gradient in place by `factor`: one pass. FP16 gradients go through float32 arithmetic."""
    for group in tensor_groups(gradients):
        # A 0-d float32 tensor, not a number: `float(factor)` would synchronize, and an FP16 factor loses 1 / scale.
        local = to_device(factor, group.device)
        torch._foreach_mul_(group.tensors, local)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def clamp(gradients: Sequence[Tensor], bound: Tensor) -> None:
    """Clamps every gradient element in place to [-bound, bound]; of a complex one, each of its two parts."""
    for group in tensor_groups(gradients):
        local = to_device(bound, group.device, group.dtype)
        # `_foreach_clamp_max_` takes numbers or one bound for each tensor, not a single 0-d tensor.
        for grad in group.tensors:
            grad.clamp_(-local, local)


def _create_momentum(optimizer: torch.optim.SGD) -> None:
    """Gives fused SGD its momentum buffers before its first step."""
    # torch 2.13 allocates them uninitialized for the kernel to fill, which a skipped step does not: later steps then
    # start from garbage. Zeros are exact where there is no dampening: 0 * momentum + grad is the first step's buffer.
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for parameter in _without_momentum(optimizer, group):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _without_momentum(optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    """Returns the group's parameters that have a gradient and no momentum buffer yet."""
    return [
        parameter
        for parameter in group["params"]
        if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None
    ]
