"""Stage five, remember: the last result, the metrics, and the check for a run that skips every step."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.health import Health, health_of
from gradscale.engine.health_log import HealthLog
from gradscale.engine.measurement import Measurement
from gradscale.engine.metrics import metrics_of
from gradscale.engine.stuck import MAX_CONSECUTIVE_SKIPS, OnStuck, Progress, StuckCheck
from gradscale.torch.ranks.log import is_first_rank
from gradscale.torch.step import host_copy
from gradscale.torch.step.decide import Decision, Rule
from gradscale.torch.step.gradients import Names
from gradscale.torch.step.host_copy import HostCopy, host_value, read_now
from gradscale.torch.step.plan import StepPlan
from gradscale.torch.step.result import StepResult, Traces
from gradscale.torch.step.vitals import vitals
from gradscale.torch.step.weights import WeightSizes

Optimizer = torch.optim.Optimizer

SAMPLE_EVERY = 16
"""Steps between two host copies of the skip counter, and between two reads of the largest gradient for the headroom."""


class Counted(Protocol):
    """The numbers of a `ScaleState` that are shown and checked: numbers in host memory, or all of them 0-d tensors."""

    @property
    def scale(self) -> Any: ...
    @property
    def applied(self) -> Any: ...
    @property
    def skipped(self) -> Any: ...
    @property
    def consecutive_skips(self) -> Any: ...
    @property
    def stuck(self) -> Any: ...


def result_of(
    plan: StepPlan,
    measurement: Measurement,
    decision: Decision,
    rule: Rule,
    names: Names,
    *,
    updated: bool | None = None,
) -> StepResult:
    """Returns the result of a step, whose decision `rule` has taken over.

    `updated` is whether the optimizers were, if the host knows.
    """
    seen = decision.seen
    # In host memory the outcome is known, and gradients that are all finite need not be traced.
    total = host_value(measurement.total)
    all_finite = total is not None and math.isfinite(total)
    # Counted now, as gradients may be cleared before anyone asks; not in a step that may have been applied.
    known_skip = updated is False or total is not None
    has_amax = plan.finds_amax or measurement.amax is not None
    return StepResult(
        applied=decision.applied,
        scale=plan.window.scale,
        next_scale=rule.scale,
        loss_finite=rule.tensor(seen.loss_finite),
        grad_norm=rule.tensor(seen.norm) if plan.norm and decision.attempted else None,
        amax=rule.tensor(seen.amax) if has_amax and decision.attempted else None,
        retries=plan.window.retries,
        attempted=decision.attempted,
        sizes=None if all_finite else measurement.sizes,
        traces=None if all_finite else Traces(plan.gradients, measurement.sizes if known_skip else None),
        parameter_names=names,
        gradient_count=len(plan.gradients),
        known=updated,
    )


class Memory:
    """What a scaler remembers of its steps, read without synchronizing.

    Attributes:
        last: the result of the last step.
        on_skips: called with the number of steps skipped in a row, where the host knows it, before the check for a
            stuck run.
        together: returns whether ranks must learn of it at the same step. On a device they may synchronize for it then,
            with work that was queued many steps before.
    """

    def __init__(self, max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS, on_stuck: OnStuck = "raise") -> None:
        self._stuck_check = StuckCheck(max_consecutive_skips, on_stuck)
        self.on_skips: Callable[[int, StepResult], None] = lambda skips, result: None
        self.together: Callable[[], bool] = lambda: False
        self.forget()

    def __reduce__(self) -> tuple[type["Memory"], tuple[Any, ...]]:
        """A copy starts empty: results refer to gradients of the original."""
        return Memory, (self._stuck_check.max_consecutive_skips, self._stuck_check.on_stuck)

    def forget(self) -> None:
        """Forgets every step, as at the start."""
        self._stuck_check.forget()
        self.last: StepResult | None = None
        self._amax: Tensor | None = None
        self._steps = 0
        self._known_skips: int | None = 0
        self._weights = WeightSizes()
        self._last_finite_loss: Any = 0
        self._counters: tuple[int, HostCopy] | None = None
        self._numbers: HostCopy | None = None
        self._metrics = _as_metrics([math.nan] * 5)
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._counted = 0, 0
        self._log = HealthLog()

    @property
    def samples(self) -> bool:
        """Whether the next step reads its largest gradient for the metrics."""
        return self._steps % SAMPLE_EVERY == 0

    def count(self) -> None:
        """Counts a step that only other ranks have taken, so that all of them sample the same steps."""
        self._steps += 1

    def begin(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Measures the weights before the first step. Does not synchronize with the device."""
        self._weights.begin(optimizers, device)

    def weights_at_start(self) -> float | None:
        """Returns the largest weight before the first step; None before that. Synchronizes with the device."""
        return self._weights.at_start

    def keep(self, result: StepResult, state: Counted, optimizers: Sequence[Optimizer]) -> None:
        """Keeps the result, and raises or warns if the run has been stuck for too long. Does not synchronize.

        `state` is the state after the step. The weights of `optimizers` are measured only for a report. On an
        accelerator the counters are read a few steps late. Where the result has no amax, the last one is kept.
        """
        self.last = result
        self._amax = self._amax if result.amax is None else result.amax
        if not result.attempted:
            return
        self._steps += 1
        self._optimizers = list(map(weakref.ref, optimizers))
        if _on_device(state):
            progress = self._late_progress(result, state)
            skips = self._late_skips(result, progress)
        else:
            progress, skips = self._progress(result, state), int(state.consecutive_skips)
        if skips is not None:
            self.on_skips(skips, result)
        if progress is not None:
            self._stuck_check.check(progress, result, lambda: self._weights.now(optimizers, result.parameter_names))

    def _late_skips(self, result: StepResult, progress: Progress | None) -> int | None:
        """Returns how many steps in a row were skipped, if the host knows: it may be of a few steps ago."""
        # For an optimizer that is not fused, the host reads at every step whether it is applied.
        unknown = result.known is None or (not result.known and self._known_skips is None)
        self._known_skips = None if unknown else 0 if result.known else (self._known_skips or 0) + 1
        return self._known_skips if progress is None else progress.consecutive_skips

    def _progress(self, result: StepResult, state: Counted) -> Progress | None:
        """Returns where the run stands, from a state in host memory; None if the step was applied."""
        loss_finite = bool(read_now(result.loss_finite))
        if loss_finite:
            self._last_finite_loss = int(state.applied) + int(state.skipped)
        if not state.consecutive_skips:
            self._stuck_check.forget()
            return None
        return Progress.of(state, loss_finite, self._last_finite_loss or None)

    def _late_progress(self, result: StepResult, state: Counted) -> Progress | None:
        """Returns where the run stood a few steps ago, if a copy of it has arrived; starts a copy now and then."""
        # Counted by the steps since the start of this object, which are known here.
        self._last_finite_loss = torch.where(result.loss_finite, self._steps, self._last_finite_loss)
        # At most one copy is pending: if the device falls behind, more of them would pile up.
        if self._counters is None and self._steps % SAMPLE_EVERY == 0:
            counts = (state.applied, state.skipped, state.consecutive_skips, state.stuck)
            self._counters = self._steps, HostCopy(*counts, result.loss_finite, self._last_finite_loss)
        if self._counters is None or not self._arrived(*self._counters):
            return None
        (copied_at, copy), self._counters = self._counters, None
        applied, skipped, skips, stuck, loss_finite, last_finite_loss = map(int, copy.read())
        since = None if not last_finite_loss else applied + skipped - (copied_at - last_finite_loss)
        return Progress(applied, skipped, skips, bool(stuck), bool(loss_finite), since)

    def _arrived(self, copied_at: int, copy: HostCopy) -> bool:
        """Returns whether a copy that was started at a step is to be read now."""
        return self._steps - copied_at >= SAMPLE_EVERY - 1 if self.together() else copy.arrived

    def health(self, state: Counted, *, scaling: bool, in_bf16: bool, multiplies: bool = True) -> Health:
        """Returns how the run is doing, and logs it on rank 0 if it has changed. Synchronizes with the device."""
        optimizers = [each for reference in self._optimizers if (each := reference()) is not None]
        seen = vitals(self.last, state, optimizers, self._weights, self._amax, self._counted)
        self._counted = seen.applied, seen.skipped
        health = health_of(replace(seen, scaling=scaling, in_bf16=in_bf16, multiplies=multiplies))
        if is_first_rank():
            self._log.note(health)
        return health

    def metrics(self, state: Counted) -> dict[str, float]:
        """Returns the newest numbers known on the host, and starts a copy of newer ones. Does not synchronize."""
        self._receive()
        if self._numbers is None:
            self._numbers = self._copied(state)
            self._receive()  # on the CPU the copy is ready at once
        return dict(self._metrics)

    def _copied(self, state: Counted) -> HostCopy:
        # Numbers in host memory stay there, whatever torch's default device is.
        device = state.scale.device if isinstance(state.scale, Tensor) else "cpu"
        norm = None if self.last is None else self.last.grad_norm
        # Filled in: a copy of a number to the device would synchronize.
        unknown = torch.full((), math.nan, dtype=torch.float32, device=device)
        sizes = [unknown if size is None else size for size in (norm, self._amax)]
        numbers = (state.scale, state.applied, state.skipped, *sizes)
        return HostCopy(*(torch.as_tensor(number, device=device) for number in numbers))

    def _receive(self) -> None:
        if self._numbers is not None and self._numbers.arrived:
            self._metrics = _as_metrics(self._numbers.read())
            self._numbers = None


def _on_device(state: Counted) -> bool:
    """Returns whether reading the state would synchronize. With numpy 1 its numbers are tensors on a CPU too."""
    return isinstance(state.scale, Tensor) and not host_copy.in_host_memory(state.scale.device)


def _as_metrics(numbers: list[float]) -> dict[str, float]:
    scale, applied, skipped, norm, amax = map(np.float64, numbers)
    state: Any = SimpleNamespace(scale=scale, applied=applied, skipped=skipped)
    return {name: float(value) for name, value in metrics_of(state, norm, amax, np).items()}
