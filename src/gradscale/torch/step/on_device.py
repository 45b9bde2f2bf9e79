"""A step whose rule runs on the device, as one kernel: gradients are read there, and the host reads nothing."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.packed import Outcome, Packed
from gradscale.kernels.torch import share_above
from gradscale.kernels.triton.operator import advance, number_of, refusal
from gradscale.policies.contract import ScaleState, Seen
from gradscale.torch import host
from gradscale.torch.gradients import Gradients, keeps_masters
from gradscale.torch.host import Facts, Rule, filled
from gradscale.torch.ranks.round import Rounds
from gradscale.torch.step.apply import StepPlan, folds, plan_step
from gradscale.torch.step.measure import divide_and_check
from gradscale.torch.window.window import Window

LOG = logging.getLogger(__name__)

WIDE = frozenset((torch.float32, torch.bfloat16))
"""Types whose range is that of float32, in which kernels divide."""

MARGIN = np.float32(2.0**-8)
"""How far the scale may have fallen since the host last knew it. Where it may be below 1, which makes gradients larger,
they are not divided before their size is known."""


@dataclass(eq=False)
class DeviceFacts(Facts):
    """The facts of a step whose rule the device has followed.

    Attributes:
        packed: what was read, and decided.
        numbers: the vector that was read, in which the sizes of gradients end at `first` and `end`, and losses follow.
        first: as said.
        end: as said.
        losses: how many of the window count: 0 where other ranks have losses of their own.
        agreed: whether they are those of all ranks.
    """

    packed: Packed = None  # type: ignore[assignment]
    numbers: Tensor = None  # type: ignore[assignment]
    first: int = 0
    end: int = 0
    losses: int = 0
    agreed: bool = False


@dataclass(eq=False)
class LiveFacts(DeviceFacts):
    """The facts of a step that may be captured: those of its last replay, read from the device whenever asked."""

    live: ClassVar[bool] = True

    @property
    def arrived(self) -> bool:
        """Whether `seen` would return at once."""
        return False

    def seen(self) -> Seen:
        """Returns them as numpy scalars. Synchronizes with the device."""
        assert self.read is not None and self.vector is not None  # noqa: S101, PT018
        return self.read(self.vector.tolist())


def plan_on_device(
    rule: Rule, gradients: Gradients, window: Window, *, loss_gates: bool = True, **asked: Any
) -> StepPlan | None:
    """Returns the plan of a step whose rule the device runs, or None where the host runs it. Does not synchronize.

    The host does for optimizers that are not fused, after edits and retries, for gradients of more than one type or
    device, and where the device has no kernel for the rule. Arguments are as those of `Packed` and `plan_step`.
    """
    if (plan := _plan(rule, gradients, window, loss_gates, **asked)) is None and rule.capturable:
        raise not_capturable(rule, gradients)
    return plan


def not_capturable(rule: Rule, gradients: Gradients) -> RuntimeError:
    """Returns the error for a step that only the host can make."""
    kinds = sorted({f"{each.dtype} on {each.device}" for each in gradients.values})
    names = [type(each).__name__ + ("" if folds(each) else " that is not fused") for each in gradients.optimizers]
    kernel = f"; no kernel: {rule.no_kernel}" if rule.no_kernel else ""
    received = f"{', '.join(names)}, with gradients of {', '.join(kinds) or 'no parameter'}{kernel}"
    return RuntimeError(
        "A step with `capturable=True` needs a kernel for the policy on the device, optimizers that are fused, and "
        "gradients of one type (float32 or BF16, or FP16 with `MasterWeights`) on one device that is not the CPU. It "
        f"has one rank and one `update`, and neither `retries` nor `unscaled`. Received: {received}. Leave out "
        "`capturable` for a step that is not to be captured."
    )


def _plan(rule: Rule, gradients: Gradients, window: Window, loss_gates: bool, **asked: Any) -> StepPlan | None:
    if not (gradients.grads and window.notes) or host.in_host_memory(window.scale.device):
        return None
    device, optimizers = window.scale.device, gradients.optimizers
    dtypes, devices = ({getattr(each, name) for each in gradients.values} for name in ("dtype", "device"))
    notes_here = all(not marked and note.device == device for marked, note in window.notes)
    narrow = torch.float16 in dtypes and not all(map(keeps_masters, optimizers))
    alike = dtypes <= {*WIDE, torch.float16} and len(dtypes) == 1 and devices == {device} and notes_here
    if window.unscaled is not None or window.retries or not (alike and all(map(folds, optimizers))):
        return None
    if rule.no_kernel is None:
        rule.no_kernel = refusal(rule.policy, device)
        if rule.no_kernel:
            LOG.info("The rule of the scale runs on the host, not on %s: %s", device, rule.no_kernel)
    if rule.no_kernel:
        return None
    if window.ahead is None:
        if window.start is not rule.catch_up():
            return None  # the host has gone on since
        window.ahead = rule.uploaded(device)
    lowest, steps = np.float32(1.0), 0  # the same at every step
    if rule.capturable:
        asked |= {"sample": False, "divide": False}  # divided first, no gradient would count at a scale below 1
    else:
        lowest, steps = rule.latest.scale * MARGIN, window.steps
    plan = plan_step(rule, gradients, window.scale, lowest, steps, **asked)
    if window.ahead is None or (narrow and (plan.grows or rule.capturable)):
        return None
    reads = {"norm": plan.norm, "amax": plan.amax or not plan.norm, "clips": plan.clip_norm is not None}
    packed = Packed(rule.policy, **reads, shrinks=narrow or plan.divides, loss_gates=loss_gates)
    return plan._replace(kernel=packed, waits=False)


def seen_on_device(plan: StepPlan, window: Window, *, losses: bool = True, rounds: Rounds | None = None) -> DeviceFacts:
    """Reads the gradients, and queues the rule on the device. Returns the facts of the step.

    Divides the gradients meanwhile if the plan says so. Does not synchronize: what the host wants to know of the step
    arrives as a copy.

    Args:
        plan: that of `plan_on_device`.
        window: whose losses count.
        losses: whether they do: not where other ranks have losses of their own.
        rounds: the ranks that decide together; None for this one alone.
    """
    assert plan.kernel is not None  # noqa: S101
    packed, device = plan.kernel, plan.scale.device
    values, found = list(plan.gradients.values), list[Tensor]()
    with torch.no_grad():  # gradients made with `create_graph` have a graph
        if packed.norm:
            found += torch._foreach_norm(values, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        first = len(found)
        if plan.divides:
            found.append(torch.pow(math.inf, divide_and_check(plan)))  # 1 if all were finite, else inf
        elif packed.amax:
            filled_up = [grad if grad.numel() else grad.sum().reshape(1) for grad in values]  # it raises for empty ones
            found += torch._foreach_norm(filled_up, math.inf, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        end = len(found)
        notes = [note for _, note in window.notes] if losses else [filled(0.0, device)]
        weights = None if plan.edge is None or rounds is None else rounds.weights(plan.gradients)
        share = [] if plan.edge is None else [share_above(values, filled(plan.edge, device), device, weights)]
        numbers = torch.stack([*found, *notes, *share])
        sizes = None if plan.divides else numbers[: first if packed.norm else end]
        if rounds is not None:
            sent = {"share": packed.shares, "amax": plan.finds_amax, "bounds": plan.bounds}
            numbers = rounds.send_from_device(plan.gradients, numbers, window.scale, first, end, **sent)
            first, end = int(packed.norm), packed.norm + (end > first)
    facts = followed(packed, window, numbers, first, end, len(notes), plan.clip_norm)
    facts.sizes, facts.losses, facts.agreed = sizes, len(notes) if losses else 0, rounds is not None
    return facts


def merged_on_device(found: Sequence[Facts], window: Window) -> DeviceFacts | None:
    """Returns the facts of several optimizers as those of one step; None where only the host can merge them."""
    each = [facts for facts in found if isinstance(facts, DeviceFacts)]
    if len(each) < len(found) or not each:
        return None
    one, policy = each[0], window.rule.policy  # whose numbers may have been set since
    notes = [note.reshape(1) for _, note in window.notes] if one.losses else []
    if len(each) == 1 and one.losses == len(notes) and one.packed.policy == policy:
        return one
    shrinks, device = any(other.packed.shrinks for other in each), one.numbers.device
    kinds = {replace(other.packed, policy=policy, clips=False, shrinks=shrinks) for other in each}
    packed, agreed = kinds.pop(), any(other.agreed for other in each)
    if kinds or packed.shares or agreed or any(note.device != device for note in notes):
        return None
    notes = notes or [filled(0.0, device).reshape(1)]
    norms, peaks = [x.numbers[: x.first] for x in each], [x.numbers[x.first : x.end] for x in each]
    first, end = sum(map(len, norms)), sum(map(len, norms + peaks))
    return followed(packed, window, torch.cat([*norms, *peaks, *notes]), first, end, len(notes), None)


def followed(
    packed: Packed, window: Window, numbers: Tensor, first: int, end: int, losses: int, clip_norm: float | None
) -> DeviceFacts:
    """Queues the rule for the numbers that were read, from the start of the window."""
    assert window.ahead is not None  # noqa: S101
    rule = window.rule
    vector = advance(window.ahead, numbers, first, end, clip_norm or 0.0, number_of(packed))
    floats, known = vector.view(torch.float32), list[tuple[ScaleState, Outcome]]()

    def read(numbers: list[Any]) -> Seen:  # it holds no gradient
        known[:] = [packed.unpack(np.array(numbers, np.int32))]
        return known[0][1].seen

    return (LiveFacts if rule.capturable else DeviceFacts)(
        copy=None if rule.capturable else host.HostCopy(vector),
        read=read,
        norm=(lambda: floats[packed.at("norm")]) if packed.norm else None,
        found_inf=lambda: floats[packed.at("found_inf")],
        after=lambda: known[0],
        vector=vector,
        divisor=floats[packed.at("divisor")],
        packed=packed,
        numbers=numbers,
        first=first,
        end=end,
        losses=losses,
    )
