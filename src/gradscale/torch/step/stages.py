"""One step of `LossScaler`: its stages in order, from the plan to the end of the accumulation window."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradscale.engine.measurement import Measurement
from gradscale.kernels.torch import CPU
from gradscale.policies.contract import ScaleState
from gradscale.torch.accumulation.buffers import BufferGuard
from gradscale.torch.accumulation.edits import unscale_rest
from gradscale.torch.accumulation.window import Window, Windows
from gradscale.torch.checks import check_step, refuse_narrow, warn_of_half
from gradscale.torch.ranks.pipeline import Pipeline
from gradscale.torch.step.agree import Agreement
from gradscale.torch.step.apply import apply, multiply
from gradscale.torch.step.decide import Decision, Rule
from gradscale.torch.step.gradients import Names, collect, parameters_of, sum_parts
from gradscale.torch.step.host_copy import host_value
from gradscale.torch.step.measure import measure, measure_sizes
from gradscale.torch.step.no_scaling import read_unscaled, step_without_scaling
from gradscale.torch.step.plan import StepPlan, plan_step
from gradscale.torch.step.remember import Memory, result_of
from gradscale.torch.step.result import StepResult

Optimizer = torch.optim.Optimizer


class Ended(NamedTuple):
    """A step that is complete, and that the scaler has yet to remember.

    Attributes:
        result: its result.
        state: the state of the policy after it.
        optimizers: those of the step.
    """

    result: StepResult
    state: ScaleState
    optimizers: Sequence[Optimizer]


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
        self._rounds = agreement.rounds
        self._memory = memory
        self._windows = windows
        self._warned_of_half = False

    @property
    def device(self) -> torch.device:
        """The device of the scale; before the first loss, that of the first parameter."""
        return self._rule.device or next((each.device for each in self._names.parameters()), CPU)

    def refuse_scale(self) -> None:
        """Raises inside the loss function of a pipeline, which is scaled where it is called."""
        if self.pipeline is not None:
            self.pipeline.refuse_scale()

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
    ) -> Ended:
        """Runs all stages of a step. `join` is what torch's `Join` has set on the scaler."""
        samples, window = self._memory.samples, self._windows.open
        self._agreement.begin(join, window)
        try:
            plan = self._planned(optimizers, clip_norm, clip_value, norm=norm)
            measurement = self._measured(plan)
        except Exception as error:
            self._fail(error, optimizers, window)
            raise
        return self._finished(plan, measurement, samples)

    def _fail(self, error: Exception, optimizers: Sequence[Optimizer], window: Window | None = None) -> None:
        """Tells the other ranks that this one cannot take part in the step. `window` was open when it began."""
        if self._rounds.ranks == 1:
            return
        held = [each for each in optimizers if isinstance(each, Optimizer)]
        # The others sum theirs before they come to the round.
        sum_parts(parameters_of(held) if held else self._names.parameters())
        self._agreement.fail(error, held, self.device, window)
        if self._rounds.missed:  # others have applied this step: it is over
            self._windows.close()

    def run_without_scaling(
        self,
        optimizers: Sequence[Optimizer],
        clip_norm: float | None,
        clip_value: float | None,
        *,
        norm: bool,
        join: Any = None,
    ) -> StepResult:
        """Returns the result of a step under `NoScaling`, which only clips and applies. `join` is as in `run`."""
        norm = norm or clip_norm is not None
        sends = self._agreement.begin_without_scaling(join, norm=norm)
        try:
            check_step(optimizers, clip_norm, clip_value)
            if norm:
                self._rounds.check_shards(optimizers)
            unscaled = read_unscaled(self._rule, optimizers, norm=norm, bounds=clip_value is not None)
        except Exception as error:
            if sends:
                self._fail(error, optimizers)
            raise
        if sends:
            unscaled = unscaled.agreed(self._agreement, self._rule.scale, norm=norm)
        return step_without_scaling(self._rule, optimizers, unscaled, self._names, clip_norm, clip_value, norm=norm)

    def run_in_closure(self, owner: Optimizer, device: torch.device) -> Ended:
        """Runs all stages but one: the gradients are unscaled, and `owner`, which holds them, is not stepped."""
        self._agreement.begin(window=self._windows.open)
        window = self._windows.get(device)
        samples = self._memory.samples
        try:
            self._rounds.check_shards([owner])
            plan = plan_step(self._rule, [owner], window, norm=True, sample=samples, fold=False)
            measurement = self._measured(plan)
        except Exception as error:
            self._fail(error, [owner], window)
            raise
        decision = self._decided(plan, measurement)
        self._warn_of_half(plan, samples)
        if not plan.keeps:
            multiply(plan.gradients.values, torch.where(decision.applied, decision.factor, 1.0))
        return self._closed(plan, measurement, decision)

    def _planned(
        self, optimizers: Sequence[Optimizer], clip_norm: float | None, clip_value: float | None, *, norm: bool
    ) -> StepPlan:
        """Returns the plan of a step, or raises if its gradients cannot be used."""
        check_step(optimizers, clip_norm, clip_value)
        self._rounds.check_shards(optimizers)
        window = self.ready(optimizers)
        if window.unscaled:
            unscale_rest(collect(optimizers), window, self._rule.policy, self._names, self._rounds.weights)
        plan = plan_step(
            self._rule,
            optimizers,
            window,
            norm=norm,
            sample=self._memory.samples,
            clip_norm=clip_norm,
            clip_value=clip_value,
        )
        if plan.divided_first:
            call = "`step` with a gradient that is held twice" if clip_value is None else "`clip_value`"
            refuse_narrow(call, plan.divided_first, self._names)
        return plan

    def _measured(self, plan: StepPlan) -> Measurement:
        """Returns the measurement of this rank: stage one."""
        try:
            return measure(plan, None if plan.edge is None else self._rounds.weights(plan.gradients))
        except BaseException:
            # Some gradients may have been divided: closed, so that another step cannot divide them again.
            self._windows.close(plan.optimizers)
            raise

    def _finished(self, plan: StepPlan, measurement: Measurement, samples: bool) -> Ended:
        """Runs the stages after the measurement. With `samples`, FP16 parameters are looked for."""
        try:
            decision = self._decided(plan, measurement)
            updated = self._applied(plan, decision, samples)
        except BaseException:
            self._windows.close(plan.optimizers)  # as in `_measured`
            raise
        if plan.divides and not updated:
            # The kernel that checks and divides has one flag for all gradients. A gradient that was not finite is not
            # finite after the division either, and can be named now. The amax would be that of divided gradients.
            measurement = measure_sizes(plan.gradients.values, plan.divisor.device)._replace(amax=None)
        return self._closed(plan, measurement, decision, updated=updated)

    def _decided(self, plan: StepPlan, measurement: Measurement) -> Decision:
        """Returns the decision, the same on every rank: stages two and three."""
        seen, attempted, known = self._agreement.agree(plan, measurement, self._rule)
        if not attempted:
            return self._rule.hold(seen)
        decision = self._rule.decide(
            seen, plan.divisor, plan.clip_norm, follows_amax=plan.estimates_amax, measured=plan.amax
        )
        return decision._replace(known=known)

    def _warn_of_half(self, plan: StepPlan, samples: bool) -> None:
        if samples and not self._warned_of_half:
            self._warned_of_half = warn_of_half(plan.gradients, self._names)

    def _applied(self, plan: StepPlan, decision: Decision, samples: bool) -> bool | None:
        """Returns whether the optimizers were updated, if the host knows: stage four."""
        try:
            self._warn_of_half(plan, samples)
            self._memory.begin(plan.optimizers, plan.divisor.device)
            return apply(plan, decision.applied, decision.factor, decision.known)
        except BaseException as error:  # also one that was interrupted: the others have applied the step
            self._rounds.miss(error)
            raise

    def _closed(
        self, plan: StepPlan, measurement: Measurement, decision: Decision, *, updated: bool | None = None
    ) -> Ended:
        """Ends the window: updates the scale, settles buffers, and notes stale gradients.

        `updated` is whether the optimizers were updated, if the host knows it.
        """
        self._rule.commit(decision)
        for guard in self.buffers:
            guard.settle(decision.applied)
        result = result_of(plan, measurement, decision, self._rule, self._names, updated=updated)
        skipped = host_value(decision.applied) == 0.0 if updated is None else not updated
        if skipped and self._rounds.ranks > 1:
            # Now, when all ranks know of it: a user may ask on one of them alone.
            result.found = self._rounds.culprits(result.culprits(), plan.divisor.device)
        self._windows.close(plan.optimizers)
        return Ended(result, decision.state, plan.optimizers)
