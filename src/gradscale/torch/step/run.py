"""One step of `LossScaler`: its stages in order, from the plan to the end of the accumulation window."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradscale.engine.decide import CLIP_EPSILON
from gradscale.engine.measurement import NOTHING_READ
from gradscale.kernels.torch import CPU
from gradscale.policies.contract import Seen
from gradscale.torch import host
from gradscale.torch.checks import check_step, refuse_narrow, refuse_stepped_in_backward, refuse_unnamed, warn_of_half
from gradscale.torch.gradients import Gradients, Names, collect, keeps_masters, parameters_of
from gradscale.torch.host import Facts, Rule, filled
from gradscale.torch.ranks.pipeline import Pipeline
from gradscale.torch.ranks.round import Rounds
from gradscale.torch.step.agree import Agreement
from gradscale.torch.step.apply import Gate, StepPlan, apply, decide, edit, multiply, plan_step
from gradscale.torch.step.measure import measure_sizes, one, seen_here
from gradscale.torch.step.on_device import not_capturable, plan_on_device, seen_on_device
from gradscale.torch.step.result import SAMPLE_EVERY, Memory, StepResult, Traces
from gradscale.torch.window.buffers import BufferGuard
from gradscale.torch.window.unscaled import Unscaled
from gradscale.torch.window.window import Window, Windows

Optimizer = torch.optim.Optimizer


class Stages:
    """Plans, measures, agrees, decides and applies a step, and closes the window that it ends.

    Attributes:
        buffers: the buffers that a skipped step restores.
        pipeline: the pipeline whose stage this rank trains; None without one.
    """

    def __init__(self, rule: Rule, names: Names, agreement: Agreement, memory: Memory, windows: Windows) -> None:
        self.buffers: list[BufferGuard] = []
        self.pipeline: Pipeline | None = None
        self._rule = rule
        self._names = names
        self._agreement = agreement
        self._rounds: Rounds = agreement.rounds
        self._memory = memory
        self._windows = windows
        self._bounds: tuple[Any, Any] | None = None
        self._warned_of_half = False

    @property
    def device(self) -> torch.device:
        """The device of the scale; before the first loss, that of the first parameter."""
        return self._rule.device or next((each.device for each in self._names.parameters()), CPU)

    def ready(self, optimizers: Sequence[Optimizer]) -> Window:
        """Returns the window whose gradients are used, or raises if the order of calls is wrong."""
        if self.pipeline is not None:
            self.pipeline.ready(optimizers)
        return self._windows.ready(optimizers)

    def run(
        self,
        optimizers: Sequence[Optimizer],
        clip_norm: float | None,
        clip_value: float | None,
        *,
        norm: bool,
        join: Any = None,
    ) -> StepResult:
        """Runs all stages of a step, and returns its result. `join` is what torch's `Join` has set on the scaler."""
        bounds, watched = (clip_norm, clip_value), self._windows.watched
        # Once, unless they change: optimizers that were stepped are watched.
        known = optimizers and all(each in watched.optimizers for each in optimizers)
        if bounds != self._bounds or not known or len(set(optimizers)) < len(optimizers):
            check_step(optimizers, clip_norm, clip_value)
            self._bounds = bounds
        alone = not (dist.is_available() and dist.is_initialized()) or self._agreement.begin(optimizers, join)
        window = self._windows.ready(optimizers) if self.pipeline is None else self.ready(optimizers)
        gradients = collect(optimizers)
        if not gradients.grads:
            refuse_stepped_in_backward(optimizers, self._names)
        asked = {
            "norm": norm,
            "clip_norm": clip_norm,
            "clip_value": clip_value,
            "sample": self._memory.steps % SAMPLE_EVERY == 0,
        }
        if self._rule.capturable and not alone:
            raise not_capturable(self._rule, gradients)
        there = self._rule.capturable or not host.in_host_memory(window.scale.device)
        if there and (on_device := plan_on_device(self._rule, gradients, window, **asked)) is not None:
            plan = on_device
        elif window.unscaled is None:
            plan = plan_step(self._rule, gradients, window.scale, window.divisor, window.start.steps, **asked)
        else:
            plan = self._plan_of_edited(gradients, window, window.unscaled, **asked)
        if plan.divided_first:
            call = "`step` with a gradient that is held twice" if clip_value is None else "`clip_value`"
            refuse_narrow(call, plan.divided_first, self._names)
        if not known or not self._memory.steps:
            self._memory.begin(optimizers, plan.scale.device)
        return self._finish(plan, window, alone)

    def run_in_closure(self, owner: Optimizer, device: torch.device) -> StepResult:
        """Runs all stages but one: the gradients are unscaled, and `owner`, which holds them, is not stepped."""
        alone, window = self._agreement.begin([owner]), self._windows.get(device)
        asked = {"norm": True, "sample": self._memory.steps % SAMPLE_EVERY == 0, "fold": False, "divide": False}
        plan = plan_step(self._rule, collect([owner]), window.scale, window.divisor, window.start.steps, **asked)
        return self._finish(plan, window, alone, steps=False)

    def run_without_scaling(
        self,
        optimizers: Sequence[Optimizer],
        clip_norm: float | None,
        clip_value: float | None,
        *,
        norm: bool,
    ) -> StepResult:
        """Returns the result of a step under `NoScaling`: what `optimizer.step()` does, and clipping.

        Nothing is checked, and nothing synchronizes with the device.
        """
        check_step(optimizers, clip_norm, clip_value)
        norm = norm or clip_norm is not None
        gradients = collect(optimizers) if norm or clip_value is not None else Gradients([], [], [], optimizers)
        # An optimizer may have no parameters yet: groups can be added later.
        window = self._windows.get(next((parameter.device for parameter in parameters_of(optimizers)), CPU))
        self._windows.open = None
        plan = plan_step(self._rule, gradients, window.scale, window.divisor, 0, norm=norm, clip_value=clip_value)
        # An optimizer that keeps masters divides in float32: multiplying would round 16-bit gradients once more.
        clips = clip_norm is not None and clip_value is None
        plan = plan._replace(folding=list(filter(keeps_masters, optimizers)) if clips else ())
        measured, total = NOTHING_READ, None
        facts, gate = Facts(Seen()), Gate(True, None, None, None)
        if norm:
            measured = measure_sizes(gradients.values, window.scale.device, norm=True, amax=False)
            total = self._agreement.norm(gradients, measured, window.scale)
            facts = Facts(copy=host.HostCopy(total.reshape(1)), read=_seen_norm)
            if facts.arrived:
                facts.seen()
            if clip_norm is not None:
                clip = clip_norm / (total + CLIP_EPSILON)
                clip = torch.where(clip < 1.0, clip, 1.0)  # a NaN does not spread to all gradients
                gate = Gate(True, None, clip, 1.0 / clip)
        edit(plan, gate)
        apply(plan, gate)
        result = StepResult(self._rule, plan, window, Facts(Seen()), gate, names=self._names)
        result.next_scale = window.scale
        if norm:
            result.grad_norm, result.sizes, result.traces = total, measured.sizes, Traces(gradients)
        self._rule.follow(facts, partial(self._memory.note, result, facts, norm, False))
        return result

    def unscale(self, gradients: Gradients, window: Window) -> None:
        """Divides gradients by the scale in place, and notes in the window that they are, and how large they were.

        One pass to measure them and one to divide. Does not synchronize with the device.
        """
        refuse_narrow("`unscaled`", gradients.optimizers, self._names)
        edge = self._rule.reads.edge
        weights = None if edge is None else self._rounds.weights(gradients)
        found = measure_sizes(gradients.values, window.scale.device, edge=edge, weights=weights, half=True)
        share = torch.zeros_like(window.scale) if found.upper_share is None else found.upper_share
        # Noted before the edits: clipping, for instance, may make a non-finite gradient finite.
        window.note_overflow(~found.finite(window.scale, torch))
        assert found.amax is not None  # noqa: S101
        try:
            if self._rule.multiplies:
                multiply(gradients.values, 1.0 / window.scale)
            window.unscaled = window.unscaled or Unscaled()
            window.unscaled.note(gradients, found.amax / window.scale, share, weights)
        except BaseException:
            # Some may be divided, and which is not known: they must be cleared, and cannot be stepped.
            self._windows.close(gradients.optimizers)
            raise

    def _plan_of_edited(self, gradients: Gradients, window: Window, unscaled: Unscaled, **asked: Any) -> StepPlan:
        """Returns the plan of a step after edits, before which all gradients are unscaled if some of them are."""
        rest = unscaled.rest_of(gradients)
        edited = len(rest) < len(gradients) or not gradients
        if rest and edited:
            # Of a group that was added since. An optimizer that was not named is an error: the edits missed it.
            refuse_unnamed(unscaled, rest)
            self.unscale(rest, window)
        scale, divisor = (one(window.scale.device), np.float32(1.0)) if edited else (window.scale, window.divisor)
        return plan_step(self._rule, gradients, scale, divisor, window.start.steps, edited=edited, **asked)

    def _finish(self, plan: StepPlan, window: Window, alone: bool, *, steps: bool = True) -> StepResult:
        """Measures, agrees, decides and applies, updates the scale, and returns the result of the step.

        `steps` is whether the optimizers are stepped: their gradients are unscaled, and no more, if not.
        """
        device, optimizers = plan.scale.device, plan.gradients.optimizers
        # Consumed before anything is changed: whatever interrupts the step, no other can use its gradients again.
        self._windows.open = None
        try:
            if not alone:
                facts = self._agreement.agree(plan, window)
            else:
                facts = seen_here(plan, window) if plan.kernel is None else seen_on_device(plan, window)
            seen = facts.found if steps else facts.seen()
            finite = seen is None or bool(seen.finite and seen.loss_finite) or not self._rule.reads.checks
            gate = decide(plan, facts, None if seen is None else facts.attempted and finite, facts.found_inf)
            if steps:
                if plan.edits:
                    edit(plan, gate)
                apply(plan, gate)
            elif gate.factor is not None:
                multiply(plan.gradients.values, gate.factor)
            if self._memory.steps % SAMPLE_EVERY == 0 and not self._warned_of_half:
                self._warned_of_half = warn_of_half(plan.gradients, self._names)
            for guard in self.buffers:
                known = gate.found_inf is None
                guard.settle(filled(bool(gate.applied), device, torch.bool) if known else gate.found_inf == 0)
            sizes = facts.sizes
            if plan.divides and gate.applied is False and facts.attempted:
                # The kernel that checks and divides has one flag for all gradients. A gradient that was not finite is
                # not finite after the division either, and can be named now.
                sizes = measure_sizes(plan.gradients.values, device).sizes
            result = StepResult(self._rule, plan, window, facts, gate, sizes=sizes, names=self._names)
            everywhere = host.in_host_memory(device) or len(plan.folding) < len(optimizers)
            if gate.applied is False and everywhere and self._rounds.ranks > 1:
                # Now, when the hosts of all ranks know of it: a user may ask on one of them alone.
                result.found = self._rounds.culprits(result.culprits(), device)
            if facts.attempted:
                note = partial(self._memory.note, result, facts, plan.norm, plan.finds_amax)
                self._rule.follow(facts, note, estimates_amax=plan.estimates_amax, measured=plan.amax)
            return result
        finally:
            self._windows.watched.remember(optimizers)


def _seen_norm(numbers: list[float]) -> Seen:
    return Seen(norm=np.float32(numbers[0]))
