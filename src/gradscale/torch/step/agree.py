"""Stage two, agree: the measurement, made the same on all ranks that share the scale."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gradscale.engine.measurement import Measurement
from gradscale.engine.plan import Plan
from gradscale.policies.contract import Seen
from gradscale.torch.accumulation.window import Window
from gradscale.torch.ranks.join import check_joins
from gradscale.torch.ranks.norms import seen_by_all
from gradscale.torch.ranks.packet import Facts, Received
from gradscale.torch.ranks.reduced import Reduced
from gradscale.torch.ranks.rounds import Rounds
from gradscale.torch.ranks.store import meet
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Gradients, count_elements
from gradscale.torch.step.host_copy import in_host_memory
from gradscale.torch.step.plan import StepPlan

Optimizer = torch.optim.Optimizer

COMPARE_EVERY = 64
"""Calls of `step` between two rounds that only compare the scales, where the gradients tell everything else."""


def check_agree(agree: str) -> str:
    """Returns when ranks send a round, or raises if it is neither of the two names."""
    if agree not in ("auto", "always"):
        raise ValueError(f'`agree` must be "auto" or "always". Received: {agree!r}.')
    return agree


class Agreed(NamedTuple):
    """What all ranks know of a step.

    Attributes:
        seen: the facts that the decision is made from, in leaves.
        attempted: whether a rank has gradients. On an accelerator, where the host does not read it, taken to be so.
        clean: whether nothing keeps the step from being applied, where the host had to read it.
    """

    seen: Seen
    attempted: bool = True
    clean: bool | None = None


class Agreement:
    """Whether a step needs a round of the ranks, and what all of them have seen of it.

    A step has one round at most. Under plain DDP a step that is applied has none: the reduced gradients tell every rank
    the same.

    Attributes:
        rounds: the ranks that decide together.
        reduced: whether DDP has reduced the gradients.
        compared: whether the ranks know that none of them has a scale, under `NoScaling`.
    """

    def __init__(self, rounds: Rounds, modules: Sequence[nn.Module] = (), *, always: bool = False) -> None:
        """Starts before the first step.

        Args:
            rounds: as the attribute.
            modules: those trained.
            always: send a round at every step, also where the gradients tell everything.
        """
        self.rounds = rounds
        self.reduced = Reduced(modules)
        self.compared = False
        self._always = always
        self._calls = 0
        self._reduced_last = False

    def begin(self, join: Any = None, window: Window | None = None) -> None:
        """Begins a step. Raises what the last one has found on an accelerator, where it could not be read at once.

        `join` is what torch's `Join` has set on the scaler, and `window` the one that is open.
        """
        self.rounds.begin(window)
        self._calls += 1
        check_joins(self.reduced.joining, join)

    def begin_without_scaling(self, join: Any, *, norm: bool) -> bool:
        """Begins a step under `NoScaling`, and returns whether it has a round.

        It has one for a `norm`, inside `Join`, where ranks without batches follow, and at the first step of such a
        policy, to find ranks that do have a scale. `join` is as in `begin`.
        """
        if self.rounds.ranks == 1:
            return False
        joining = self.reduced.joining
        follows = joining and join is not None and join.enable
        sends = norm or follows or not (self.compared or joining)
        if sends:
            self.begin(join)
        return sends

    def fail(
        self, error: Exception, optimizers: Sequence[Optimizer], device: torch.device, window: Window | None = None
    ) -> None:
        """Tells the other ranks that this one cannot take part in the step, so that none of them waits for it.

        They raise a `RankFailed` with the reason; this rank raises its `error`. Where their step has no round, they
        apply it, and learn of the failure from the gradients of the next. `window` is the one that was open when the
        step began.
        """
        if self.rounds.ranks == 1:
            return
        valid = [each for each in optimizers if isinstance(each, Optimizer)]
        if self._told(window) and self._quiet(valid, device):
            # As `agree` on the other ranks, which have the same gradients.
            clean = self.reduced.all_finite()
            if clean and self._calls % COMPARE_EVERY != 1:
                self.rounds.miss(error)
                return
            if not clean:
                self._meet()
        self.rounds.fail(error, device)

    def mark(self, finite: Tensor) -> Tensor | None:
        """Returns what the gradient of a loss is multiplied by, to tell the other ranks whether the loss is finite.

        Called when its backward pass begins. None if DDP does not reduce its gradients. Those of a backward pass inside
        `no_sync` are reduced with the last one.
        """
        if self.rounds.ranks == 1 or not self.reduced.all_wrapped:
            return None
        self._reduced_last = self.reduced.during_backward()
        factor = torch.where(finite & (not self.rounds.missed), 1.0, torch.nan)
        self.reduced.mark(factor)
        return factor

    @np.errstate(all="ignore")
    def agree(self, plan: StepPlan, measurement: Measurement, rule: Rule) -> Agreed:
        """Returns the facts of the step, the same on every rank, in leaves of `rule`.

        Gradients that overflowed outside of the step count as its own, and then a loss made from them is not the cause.
        Does not synchronize with the device, except under DDP with an optimizer that is not fused.

        Raises:
            RankFailed: a rank cannot take part in the step.
            ScaleDesync: the ranks have different scales.
            RuntimeError: a norm is needed, and plain gradients differ between ranks; or their arguments do.
        """
        own = _own(plan, measurement, rule)
        if self.rounds.ranks == 1:
            return Agreed(own, bool(plan.gradients))
        clean = None
        if self._told(plan.window) and self._quiet(plan.optimizers, plan.divisor.device):
            # The same on every rank, as the gradients are: all of them send the round, or none does.
            clean = bool(own.finite & own.loss_finite)
            if clean and self._calls % COMPARE_EVERY != 1:
                return Agreed(own, bool(plan.gradients), clean)
            if not clean:
                self._meet()
        received = self._round(plan, measurement, rule.tensors(own))
        seen = rule.leaves(seen_by_all(received, plan.divisor))
        # What is not clean here is not clean anywhere; what is, may not be on another rank.
        return Agreed(seen, _any_gradients(received), None if clean else clean)

    @np.errstate(all="ignore")
    def follow(self, rule: Rule, device: torch.device) -> bool:
        """Takes part in a step of other ranks, on a rank that has no batches left, and updates its scale as they do.

        Returns whether there were gradients.
        """
        self._calls += 1
        device, scale = rule.settle(device), rule.scale
        received = self.rounds.follow(scale)
        seen = rule.leaves(seen_by_all(received, scale))
        attempted, norm = _any_gradients(received), bool(received.facts.asks_norm)
        if not rule.policy.needs:  # applied whatever the gradients are
            yes = rule.leaf(torch.ones_like(scale, dtype=torch.bool))
            seen, attempted = replace(seen, finite=yes, loss_finite=yes), True
        follows_amax = norm and Plan.of(rule.policy).amax
        if attempted:
            decision = rule.decide(seen, scale, None, follows_amax=follows_amax, measured=received.amax is not None)
        else:
            decision = rule.hold(seen)
        rule.commit(decision)
        if not decision.applied:
            self.rounds.culprits((), device)
        return attempted

    def norm(self, gradients: Gradients, measurement: Measurement, scale: Tensor) -> Tensor:
        """Returns the norm over all ranks of gradients under `NoScaling`. Every rank must call it."""
        norm = self.rounds.norm(gradients, measurement, scale)
        self.compared = True
        return norm

    def compare(self, scale: Tensor) -> None:
        """Raises if the ranks have different scales, or one of them cannot take part. Every rank must call it."""
        self.rounds.send(Facts(), None, scale)
        self.compared = True

    def _told(self, window: Window | None) -> bool:
        """Returns whether the gradients of the step tell every rank the same, and forgets it: asked once in a step."""
        reduced, self._reduced_last = self._reduced_last, False
        return reduced and not (window is not None and (window.unscaled or window.untold))

    def _quiet(self, optimizers: Sequence[Optimizer], device: torch.device) -> bool:
        """Returns whether a clean step needs no round, as far as that is known before its gradients are."""
        return not self._always and self.reduced.holds_for(optimizers, device, self.rounds.group)

    def _meet(self) -> None:
        """Waits for the other ranks before the round of a step that is not clean, which they know as this one does."""
        try:
            meet(self.rounds.group)
        except RuntimeError as error:
            self.rounds.miss(error)
            raise

    def _round(self, plan: StepPlan, measurement: Measurement, own: Seen) -> Received:
        """Returns what all ranks have seen of a step, or raises what one of them has found."""
        facts = self.rounds.or_fail(lambda: self._facts(plan, measurement, own), plan.divisor.device)
        received = self.rounds.send(facts, _amax_of(plan, own), plan.window.scale)
        if plan.norm:
            self.rounds.norms.compare_meshes(plan.gradients, measurement, received.facts, self.rounds.group)
        return received

    def _facts(self, plan: StepPlan, measurement: Measurement, own: Seen) -> Facts:
        """Returns what this rank sends of gradients and losses.

        Sizes are 0 where a gradient is not finite: they would spoil every sum.
        """
        failure = self.rounds.own_failure(failed=False)
        finite = own.finite.double()
        counted, gradients = plan.edited or plan.edge is not None, plan.gradients
        elements = count_elements(gradients.values, self.rounds.weights(gradients)) if counted else 0.0
        sums = Facts()
        if plan.norm:
            sums = self.rounds.norms.squares(gradients, measurement, own.norm, self.rounds.group, plan.divisor)
        return replace(
            sums,
            failed_rank=failure.failed_rank,
            missed=failure.missed,
            gradients=float(len(gradients) > 0),
            bad=1.0 - finite,
            # A rank that has missed a step has made its gradients NaN to say so: they are not an overflow.
            bad_loss=1.0 if self.rounds.missed else 1.0 - own.loss_finite.double(),
            above=own.upper_share * elements,
            elements=elements,
            asks_norm=float(plan.norm),
            smaller_meshes=self.rounds.norms.on_smaller_meshes(plan.gradients, self.rounds.ranks),
        )


def _own(plan: StepPlan, measurement: Measurement, rule: Rule) -> Seen:
    """Returns what this rank has seen, in leaves."""
    window, xp = plan.window, rule.xp
    overflowed = rule.leaf(window.overflowed)
    loss_finite = xp.logical_or(rule.leaf(window.loss_finite), overflowed)
    seen = rule.measurement(measurement).seen(rule.leaf(plan.divisor), loss_finite, xp, overflowed)
    if not plan.edited:
        return seen
    # From before the edits inside `unscaled`: a policy that saw clipped gradients would raise the scale until the
    # backward pass overflows.
    amax = xp.where(seen.finite, rule.leaf(window.unscaled.amax), np.inf)
    return replace(seen, amax=amax, upper_share=rule.leaf(window.unscaled.share))


def _any_gradients(received: Received) -> bool:
    """Returns whether a rank has gradients; True where reading it would synchronize."""
    gradients = received.facts.gradients
    return not in_host_memory(gradients.device) or bool(gradients)


def _amax_of(plan: StepPlan, own: Seen) -> Tensor | None:
    """Returns the largest magnitude on this rank, if it was read: 0 where it is not known."""
    return torch.where(own.finite, own.amax, 0.0) if plan.finds_amax else None
