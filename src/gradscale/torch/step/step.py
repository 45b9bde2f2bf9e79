"""One step on its way through the rooms: what it works on, what it found, and what was decided."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.decide import Outcome
from gradscale.policies.contract import Policy, Seen
from gradscale.torch.accumulation.window import Window
from gradscale.torch.step.agree import Agreement
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.finite_check import divide_and_check, measure_if_overflowed
from gradscale.torch.step.gradients import Gradients, Names, collect, keeps_masters
from gradscale.torch.step.host_copy import on_host
from gradscale.torch.step.measure import Measured, all_finite, measure, share_above
from gradscale.torch.step.result import StepResult
from gradscale.torch.step.shards import joined

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is decided and not applied yet.

    Attributes:
        optimizers: those it is for.
        window: the window it ends.
        gradients: all gradients of the optimizers.
        measured: what one read of them found.
        seen: the same in true units, agreed by every rank, in leaves of the rule.
        outcome: what follows.
        divided: whether the gradients are in true units already.
    """

    optimizers: Sequence[Optimizer]
    window: Window
    gradients: Gradients
    measured: Measured
    seen: Seen
    outcome: Outcome
    divided: bool = False

    def with_sizes(self) -> "Step":
        """Returns the step with the sizes of its gradients, which are known to have overflowed, read now."""
        return replace(self, measured=measure(self.gradients.values, self.measured.total.device, norm=False))

    def result(self, rule: Rule, names: Names, *, norm: bool) -> StepResult:
        """Returns what the user gets to see, with the norm if that was asked for.

        Args:
            rule: has moved on to the state of the next step.
            names: what parameters are called.
            norm: whether the norm was asked for.
        """
        # On the CPU a look is free, and gradients that are all finite need not be traced.
        total = on_host(self.measured.total)
        innocent = total is not None and math.isfinite(total)
        return StepResult(
            applied=self.outcome.applied,
            scale=self.window.scale,
            next_scale=rule.scale,
            loss_finite=rule.tensor(self.seen.loss_finite),
            attempted=bool(self.gradients),
            sizes=self.measured.sizes[:0] if innocent else self.measured.sizes,
            gradients=None if innocent else self.gradients,
            names=names,
            grad_norm=rule.tensor(self.seen.norm) if norm else None,
            retries=self.window.retries,
        )


def decided(
    rule: Rule,
    agreement: Agreement,
    optimizers: Sequence[Optimizer],
    window: Window,
    clip_norm: float | None = None,
    *,
    norm: bool,
    sizes: bool = True,
    divide: bool = False,
) -> Step:
    """Returns the step, its gradients measured and every rank agreed on what to do.

    Args:
        rule: has the policy and its state.
        agreement: the ranks that decide together.
        optimizers: those the step is for.
        window: the window it ends.
        clip_norm: bound on the norm of all their gradients together, in true units.
        norm: whether to measure the norm; needed for `clip_norm`.
        sizes: whether to measure how large the gradients are although neither the policy nor the norm needs it.
        divide: whether the gradients may be divided at once, in the same pass that checks them, whatever is decided.
            That is done if nobody needs their sizes. Nothing else is changed.
    """
    gradients = collect(optimizers)
    unit = window.unit(optimizers)
    sizes = sizes or norm or bool(rule.policy.needs & {"amax", "upper_share"})
    divide = divide and not sizes and unit is window.scale and _at_least_one(unit, rule.policy)
    measured, seen = look(rule, gradients, window, unit, norm=norm, sizes=sizes, divide=divide)
    if agreement.ranks > 1:
        seen = rule.leaves(agreement.over_ranks(rule.tensors(seen)))
    outcome = rule.decide(seen, unit, clip_norm) if gradients or agreement.ranks > 1 else rule.hold()
    return Step(optimizers, window, gradients, measured, seen, outcome, divide)


@np.errstate(all="ignore")
def look(
    rule: Rule, gradients: Gradients, window: Window, unit: Tensor, *, norm: bool, sizes: bool, divide: bool
) -> tuple[Measured, Seen]:
    """Returns what one read of the gradients found, and what that means on this rank, in true units.

    Gradients that overflowed outside of the step count as its own, and then no loss is to blame that was made of them.

    Args:
        rule: says what it needs to know. One that needs the share of gradients above an edge costs a second read.
        gradients: the gradients of the step.
        window: says how the losses were.
        unit: what the gradients must be divided by to be true.
        norm: whether the norm was asked for. Largest magnitudes are read otherwise.
        sizes: whether sizes are needed. Without, the CPU may only look whether all gradients are finite.
        divide: whether to divide the gradients by `unit` while they are read.
    """
    values, xp, leaf = gradients.values, rule.xp, rule.leaf
    grows, in_half = not _at_least_one(unit, rule.policy), not all(map(keeps_masters, gradients.optimizers))
    if divide:
        measured = divide_and_check(values, unit)
    elif sizes:
        measured = measure(values, unit.device, norm=norm, half=grows and in_half)
        measured = measured if values is gradients.grads else joined(measured, gradients.grads, norm=norm)
    else:
        measured = measure_if_overflowed(values, unit, divided=grows, half=in_half)
    total, divisor, overflowed = leaf(measured.total), leaf(unit), leaf(window.overflowed)
    half = None if measured.half is None else leaf(measured.half)
    finite = xp.logical_and(all_finite(total, half, divisor, xp), xp.logical_not(overflowed))
    # Edits inside `unscaled`, such as clipping, say nothing about what the backward pass has to hold.
    edited = unit is not window.scale
    seen = Seen(
        finite=finite,
        loss_finite=xp.logical_or(leaf(window.loss_finite), overflowed),
        amax=xp.where(finite, leaf(window.unscaled_amax) if edited else leaf(measured.amax) / divisor, 0.0),
        norm=total / divisor,
        upper_share=leaf(window.unscaled_share if edited else upper_share(rule.policy, values, window.scale)),
    )
    return measured, seen


def _at_least_one(unit: Tensor, policy: Policy) -> bool:
    """Returns whether `unit` is surely not below 1, so that no finite gradient divided by it is infinite."""
    known = on_host(unit)
    return getattr(policy, "min_scale", 0.0) >= 1.0 if known is None else known >= 1.0


def upper_share(policy: Policy, values: Sequence[Tensor], like: Tensor) -> Tensor:
    """Returns the share of scaled gradient elements above the policy's edge; zero, unread, where it has none.

    Args:
        policy: says where the edge is, if it needs to know.
        values: the scaled gradients.
        like: a 0-d tensor on the scaler's device.
    """
    if "upper_share" not in policy.needs:
        return torch.zeros_like(like)
    edge = torch.full_like(like, policy.edge_magnitude)  # type: ignore[attr-defined]
    return share_above(values, edge, like.device)
