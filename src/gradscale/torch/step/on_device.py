"""A step whose rule runs on the device, as one kernel: gradients are read there, and the host reads nothing."""

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.packed import START, Packed
from gradscale.kernels.torch import share_above
from gradscale.kernels.triton.operator import advance, kernel_of, refusal
from gradscale.policies.contract import ScaleState, Seen
from gradscale.torch import host
from gradscale.torch.gradients import Gradients, keeps_masters
from gradscale.torch.host import Facts, Rule, filled
from gradscale.torch.step.apply import StepPlan, folds, plan_step
from gradscale.torch.window.window import Window

LOG = logging.getLogger(__name__)

WIDE = frozenset((torch.float32, torch.bfloat16))
"""Types whose finite numbers stay finite when they are divided in float32 and stored again."""


def plan_on_device(
    rule: Rule, gradients: Gradients, window: Window, clip_value: float | None, **asked: Any
) -> StepPlan | None:
    """Returns the plan of a step whose rule the device runs, or None where the host runs it. Does not synchronize.

    The host does for optimizers that are not fused, after edits and retries, for gradients of more than one type or
    device, and where the device has no kernel for the rule. Arguments are as those of `plan_step`.
    """
    device, optimizers = window.scale.device, gradients.optimizers
    if clip_value is not None or gradients.shared or not (gradients and window.notes):
        return None
    dtypes, devices = ({getattr(each, name) for each in gradients.values} for name in ("dtype", "device"))
    notes_here = all(not marked and note.device == device for marked, note in window.notes)
    known = {*WIDE, torch.float16} if all(map(keeps_masters, optimizers)) else WIDE
    alike = dtypes <= known and len(dtypes) == 1 and devices == {device} and notes_here
    if window.unscaled is not None or window.retries or not (alike and all(map(folds, optimizers))):
        return None
    # What it must be divided by is not known here. Any scale will do, as kernels of optimizers divide in float32.
    plan = plan_step(rule, gradients, window.scale, np.float32(1.0), rule.steps, **asked)
    kernel = _kernel_for(rule, plan)
    return None if kernel is None else replace(plan, kernel=kernel)


def advance_on_device(rule: Rule, plan: StepPlan, window: Window, found: tuple[Any, ...] = ()) -> Facts:
    """Reads the gradients, unless what is read was `found`, and queues the rule on the device. Returns the facts.

    Does not synchronize: what the host wants to know of the step arrives as a copy.
    """
    assert plan.kernel is not None and rule.ahead is not None  # noqa: S101, PT018
    packed, number = plan.kernel
    with torch.no_grad():  # gradients made with `create_graph` have a graph
        numbers, first, end = found or _numbers(plan, packed, window)
        vector = rule.ahead = advance(rule.ahead, numbers, first, end, plan.clip_norm or 0.0, number)
    floats = vector.view(torch.float32)
    known: list[tuple[ScaleState, Any]] = []

    def read(numbers: list[Any]) -> Seen:  # it holds no gradient
        state, outcome = packed.unpack(np.array(numbers, np.int32))
        known.append((state, outcome.amax_ratio))
        return outcome.seen

    return Facts(
        copy=host.HostCopy(vector),
        read=read,
        sizes=numbers[: first if packed.norm else end],
        norm=(lambda: floats[packed.at("norm")]) if packed.norm else None,
        found_inf=lambda: floats[packed.at("found_inf")],
        after=lambda: known[0],
        divisor=floats[packed.at("divisor")],
    )


def _numbers(plan: StepPlan, packed: Packed, window: Window) -> tuple[Tensor, int, int]:
    """Returns what was read of gradients and losses, in one vector, and where the largest magnitudes are in it."""
    values, device = list(plan.gradients.values), plan.scale.device
    found: list[Tensor] = []
    if packed.norm:
        found += torch._foreach_norm(values, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    first = len(found)
    if packed.amax:
        filled_up = [grad if grad.numel() else grad.sum().reshape(1) for grad in values]  # it raises for an empty one
        found += torch._foreach_norm(filled_up, math.inf, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    end = len(found)
    found += [note for _, note in window.notes]
    if plan.edge is not None:
        found.append(share_above(values, filled(plan.edge, device), device))
    return torch.stack(found), first, end


def _kernel_for(rule: Rule, plan: StepPlan) -> tuple[Packed, int] | None:
    """Returns the kernel that a step needs, and its number; None if the device has none, which is logged once.

    The state of the rule is on the device then.
    """
    device = plan.scale.device
    if rule.has_kernel is None:
        refused = refusal(rule.policy, device)
        rule.has_kernel = not refused
        if refused:
            LOG.info("The rule of the scale runs on the host, not on %s: %s", device, refused)
    if not rule.has_kernel:
        return None
    kernel = kernel_of(rule.policy, plan.norm, plan.amax or not plan.norm, plan.clip_norm is not None)
    if rule.ahead is None:
        state, ratio, _ = rule.catch_up()
        if not kernel[0].holds(state):
            return None
        vector = kernel[0].pack(state, START._replace(amax_ratio=ratio))
        rule.ahead = torch.from_numpy(vector).to(device, non_blocking=True)
    return kernel
