"""Stage two, agree: the measurement, made the same on all ranks that share the scale."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.engine.culprits import Culprit
from gradscale.engine.measurement import Measurement
from gradscale.engine.plan import Plan
from gradscale.policies.contract import Seen
from gradscale.torch.accumulation.window import Window
from gradscale.torch.ranks.culprits import culprits_of_all
from gradscale.torch.ranks.errors import RankFailed
from gradscale.torch.ranks.faults import Faults
from gradscale.torch.ranks.groups import ALONE, check_distinct, check_group
from gradscale.torch.ranks.join import check_joins
from gradscale.torch.ranks.missed import Missed
from gradscale.torch.ranks.norms import Norms, seen_by_all
from gradscale.torch.ranks.packet import FLAGS, Facts, Received, exchange, join_maximum, with_flags
from gradscale.torch.ranks.placements import Distinct, Placements, check_mesh
from gradscale.torch.ranks.reduced import Reduced
from gradscale.torch.ranks.store import leave_reason, meet
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Gradients, count_elements, parameters_of
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
    """The ranks that decide together, and what they tell each other.

    A step has one round at most (`gradscale.torch.ranks.packet`). Under plain DDP a step that is applied has none: the
    reduced gradients tell every rank the same.

    Attributes:
        group: a process group; None is every rank once `torch.distributed` is initialized, `"alone"` only this one.
        reduced: whether DDP has reduced the gradients.
        missed: steps that were applied on some ranks and not on others.
        compared: whether the ranks know that none of them has a scale, under `NoScaling`.
    """

    def __init__(
        self, modules: Sequence[nn.Module] = (), group: Any = None, distinct: Distinct = None, *, always: bool = False
    ) -> None:
        """Names the ranks.

        Args:
            modules: those trained, which tell how their parameters are spread.
            group: as the attribute.
            distinct: the group over which plain tensors are distinct, or a mapping of modules or parameters to such.
            always: send a round at every step, also where the gradients tell everything.
        """
        self.group = check_group(group)
        self.reduced = Reduced(modules)
        self.missed = Missed()
        self.compared = False
        self._norms = Norms(Placements(modules, check_distinct(distinct)))
        self._always = always
        self._calls = 0
        self._faults: Faults | None = None
        self._reduced_last = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy: what one step has left for the next is not part of it."""
        return {**self.__dict__, "_faults": None}

    @property
    def ranks(self) -> int:
        """How many ranks decide together."""
        # Looked up at every step: `torch.distributed` may be initialized after the scaler is built.
        if self.group == ALONE or not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.group)

    def begin(self, join: Any = None, window: Window | None = None) -> None:
        """Begins a step. Raises what the last one has found on an accelerator, where it could not be read at once.

        `join` is what torch's `Join` has set on the scaler, and `window` the one that is open.
        """
        self.missed.check_again(window)
        self._calls += 1
        faults, self._faults = self._faults, None
        if faults is not None:
            self._raise_any(faults)
        check_joins(self.reduced.joining, join)

    def check_shards(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises if ranks outside of the group hold shards of a parameter."""
        if self.group is not None:  # else they are all inside
            for mesh in {getattr(each, "device_mesh", None) for each in parameters_of(optimizers)} - {None}:
                check_mesh(mesh, self.group)

    def begin_without_scaling(self, join: Any, *, norm: bool) -> bool:
        """Begins a step under `NoScaling`, and returns whether it has a round.

        It has one for a `norm`, inside `Join`, where ranks without batches follow, and at the first step of such a
        policy, to find ranks that do have a scale. `join` is as in `begin`.
        """
        if self.ranks == 1:
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
        if self.ranks == 1:
            return
        valid = [each for each in optimizers if isinstance(each, Optimizer)]
        if self._told(window) and self._quiet(valid, device):
            # As `agree` on the other ranks, which have the same gradients.
            clean = self.reduced.all_finite()
            if clean and self._calls % COMPARE_EVERY != 1:
                self.miss(error)
                return
            if not clean:
                self._meet()
        if not self.missed:  # else the first reason stays
            leave_reason(_text(error))
        received = exchange(self._failure(failed=True), None, device, self.group)
        if received.facts.sends_amax:
            join_maximum(device, self.group)
        faults = Faults(received.facts, torch.zeros((), device=device), self.group)
        if in_host_memory(device):
            with suppress(RankFailed):
                self._raise_any(faults)
        else:
            self._faults = faults

    def miss(self, error: BaseException) -> None:
        """Notes that this rank has failed in a step which others apply. They raise a `RankFailed` in the next round."""
        if self.ranks > 1:
            leave_reason(f"in a step that others have applied: {_text(error)}")
            self.missed.refuse()

    def mark(self, finite: Tensor) -> Tensor | None:
        """Returns what the gradient of a loss is multiplied by, to tell the other ranks whether the loss is finite.

        Called when its backward pass begins. None if DDP does not reduce its gradients. Those of a backward pass inside
        `no_sync` are reduced with the last one.
        """
        if self.ranks == 1 or not self.reduced.all_wrapped:
            return None
        self._reduced_last = self.reduced.during_backward()
        factor = torch.where(finite & (not self.missed), 1.0, torch.nan)
        self.reduced.mark(factor)
        return factor

    def weights(self, gradients: Gradients) -> Sequence[float] | None:
        """Returns what the elements of each gradient count here, so that over all ranks each element counts once.

        None if all of them count the same.
        """
        return None if self.ranks == 1 else self._norms.weights(gradients, self.group)

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
        if self.ranks == 1:
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
        facts = Facts(scale=scale, scale_squared=scale.double().square(), follows=1.0)
        received = exchange(facts, None, device, self.group)
        if sends_amax := bool(received.facts.sends_amax):
            received = received._replace(amax=join_maximum(device, self.group))
        self._raise_any(Faults(received.facts, scale, self.group))
        seen = rule.leaves(seen_by_all(received, scale))
        attempted, norm = _any_gradients(received), bool(received.facts.asks_norm)
        if not rule.policy.needs:  # applied whatever the gradients are
            yes = rule.leaf(torch.ones_like(scale, dtype=torch.bool))
            seen, attempted = replace(seen, finite=yes, loss_finite=yes), True
        follows_amax = norm and Plan.of(rule.policy).amax
        if attempted:
            decision = rule.decide(seen, scale, None, follows_amax=follows_amax, measured=sends_amax)
        else:
            decision = rule.hold(seen)
        rule.commit(decision)
        if not decision.applied:
            self.culprits((), device)
        return attempted

    def any_rank(self, flags: Tensor) -> list[bool]:
        """Returns which of `flags`, a vector of up to 3 bools, are set on any rank. Synchronizes with the device.

        Raises as `agree`, and if other ranks are in a step.
        """
        if self.ranks == 1:
            return flags.tolist()  # type: ignore[return-value]
        # In the form of a step's round: a rank that is in a step by now finds what is wrong, and so does this one.
        facts = exchange(with_flags(flags), None, flags.device, self.group).facts
        if facts.sends_amax:
            join_maximum(flags.device, self.group)
        self._raise_any(Faults(facts, torch.zeros_like(facts.scale), self.group))
        return [bool(getattr(facts, name)) for name in FLAGS[: len(flags)]]

    def culprits(self, own: Sequence[Culprit], device: torch.device) -> list[Culprit]:
        """Returns the culprits of all ranks, the same on each. Every rank must call it. Synchronizes."""
        return culprits_of_all(own, device, self.group)

    def norm(self, gradients: Gradients, measurement: Measurement, scale: Tensor) -> Tensor:
        """Returns the norm over the gradients of all ranks, which `scale` has not made. Every rank must call it.

        Does not synchronize with the device. Raises as `agree`.
        """
        norm = cast(Tensor, measurement.norm)
        if self.ranks == 1:
            return norm
        own = Facts(bad=~torch.isfinite(norm))
        _, seen = self.send_with_norm(own, None, scale, gradients, measurement, torch.ones_like(norm))
        self.compared = True
        return seen.norm

    def compare(self, scale: Tensor) -> None:
        """Raises if the ranks have different scales, or one of them cannot take part. Every rank must call it."""
        self.send(Facts(), None, scale)
        self.compared = True

    def _told(self, window: Window | None) -> bool:
        """Returns whether the gradients of the step tell every rank the same, and forgets it: asked once in a step."""
        reduced, self._reduced_last = self._reduced_last, False
        return reduced and not (window is not None and (window.unscaled or window.untold))

    def _meet(self) -> None:
        """Waits for the other ranks before the round of a step that is not clean, which they know as this one does."""
        try:
            meet(self.group)
        except RuntimeError as error:
            self.miss(error)
            raise

    def _quiet(self, optimizers: Sequence[Optimizer], device: torch.device) -> bool:
        """Returns whether a clean step needs no round, as far as that is known before its gradients are."""
        return not self._always and self.reduced.holds_for(optimizers, device, self.group)

    def send(self, facts: Facts, amax: Tensor | None, scale: Tensor) -> Received:
        """Returns what all ranks have seen, or raises what one of them has found. Every rank must call it.

        On an accelerator that is raised when the next step begins, and this one is skipped. `facts` need not have the
        scale, and whether there is an `amax`, the largest magnitude on this rank.
        """
        device, wide = scale.device, scale.double()
        known = replace(facts, scale=wide, scale_squared=wide.square(), sends_amax=float(amax is not None))
        received = exchange(known, amax, device, self.group)
        faults = Faults(received.facts, scale, self.group)
        if not in_host_memory(device):
            self.missed.raise_again()
            self._faults = faults
            self.missed.end_round()
            return received._replace(facts=replace(received.facts, bad=received.facts.bad + faults.any))
        if received.amax is None and received.facts.sends_amax:
            join_maximum(device, self.group)
        self.missed.raise_again()
        self._raise_any(faults)
        self.missed.end_round()
        return received

    def _raise_any(self, faults: Faults) -> None:
        """Raises what a round has found, and notes it if no rank may go on after it."""
        try:
            faults.raise_any()
        except RankFailed as error:
            self.missed.note(error)
            raise

    def _failure(self, *, failed: bool) -> Facts:
        """Returns what this rank sends if it has `failed` in this step, or missed one before."""
        missed = bool(self.missed)
        rank = float(dist.get_rank()) if failed or missed else 0.0
        return Facts(failed=float(failed), failed_rank=rank, missed=float(missed))

    def _round(self, plan: StepPlan, measurement: Measurement, own: Seen) -> Received:
        """Returns what all ranks have seen of a step, or raises what one of them has found."""
        facts = self._or_fail(lambda: self._facts(plan, measurement, own), plan.divisor.device)
        received = self.send(facts, _amax_of(plan, own), plan.window.scale)
        if plan.norm:
            self._norms.compare_meshes(plan.gradients, measurement, received.facts, self.group)
        return received

    def send_with_norm(
        self,
        facts: Facts,
        amax: Tensor | None,
        scale: Tensor,
        gradients: Gradients,
        measurement: Measurement,
        divisor: Tensor,
    ) -> tuple[Received, Seen]:
        """Returns what `send` does, and what all ranks have seen: with the norm of the gradients divided by `divisor`.

        `measurement` is that of the gradients of this rank, with their norms.
        """
        norm = cast(Tensor, measurement.norm) * (1.0 / divisor)
        squares = self._or_fail(
            lambda: self._norms.squares(gradients, measurement, norm, self.group, divisor), scale.device
        )
        known = replace(
            facts,
            spread=squares.spread,
            same=squares.same,
            same_squared=squares.same_squared,
            holders=squares.holders,
            asks_norm=1.0,
            smaller_meshes=self._norms.on_smaller_meshes(gradients, self.ranks),
        )
        received = self.send(known, amax, scale)
        self._norms.compare_meshes(gradients, measurement, received.facts, self.group)
        return received, seen_by_all(received, divisor)

    def _or_fail(self, facts: Callable[[], Facts], device: torch.device) -> Facts:
        """Returns what this rank sends, or raises, and tells the other ranks that it cannot take part in the step."""
        try:
            return facts()
        except Exception as error:  # such as a parameter of which ranks outside of the group have shards
            self.fail(error, (), device)
            raise

    def _facts(self, plan: StepPlan, measurement: Measurement, own: Seen) -> Facts:
        """Returns what this rank sends of gradients and losses.

        Sizes are 0 where a gradient is not finite: they would spoil every sum.
        """
        failure = self._failure(failed=False)
        finite = own.finite.double()
        counted, gradients = plan.edited or plan.edge is not None, plan.gradients
        elements = count_elements(gradients.values, self.weights(gradients)) if counted else 0.0
        sums = Facts()
        if plan.norm:
            sums = self._norms.squares(gradients, measurement, own.norm, self.group, plan.divisor)
        return replace(
            sums,
            failed_rank=failure.failed_rank,
            missed=failure.missed,
            gradients=float(len(gradients) > 0),
            bad=1.0 - finite,
            # A rank that has missed a step has made its gradients NaN to say so: they are not an overflow.
            bad_loss=1.0 if self.missed else 1.0 - own.loss_finite.double(),
            above=own.upper_share * elements,
            elements=elements,
            asks_norm=float(plan.norm),
            smaller_meshes=self._norms.on_smaller_meshes(plan.gradients, self.ranks),
        )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


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
