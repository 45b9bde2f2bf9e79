"""What `GradScaler` remembers: the steps since the last `update`, and the counts and the stuck check of all."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.engine.health import Health
from gradscale.engine.stuck import OnStuck
from gradscale.engine.texts import scaler_text
from gradscale.torch.drop_in.counters import Counters
from gradscale.torch.drop_in.losses import Losses
from gradscale.torch.drop_in.stepped import Stepped
from gradscale.torch.step.gradients import collect
from gradscale.torch.step.host_copy import host_value, shown
from gradscale.torch.step.remember import Memory
from gradscale.torch.step.result import StepResult, Traces

Optimizer = torch.optim.Optimizer

STUCK_AT = 1.0
"""Scale at or below which a lower one is not expected to help: the gradients do not fit into FP16 unscaled."""


class Closed(NamedTuple):
    """The steps that the last `update` has ended.

    Attributes:
        optimizers: those stepped.
        results: theirs.
        losses: the sums of the losses.
    """

    optimizers: Sequence[Optimizer]
    results: Sequence[StepResult]
    losses: Mapping[torch.device, Tensor]


class Steps:
    """The optimizers stepped since the last `update`, their results and losses; and the counts since the start.

    Attributes:
        losses: the losses scaled since the last `update`.
        counters: how many steps were applied and skipped.
        retries: how often a backward pass was run again since the last `update`.
    """

    def __init__(self, max_consecutive_skips: int, on_stuck: OnStuck, scale: float) -> None:
        self.losses = Losses()
        self.counters = Counters(scale)
        self.retries = 0
        self._memory = Memory(max_consecutive_skips, on_stuck)
        self._optimizers: list[Optimizer] = []
        self._results: list[StepResult] = []
        self._closed = Closed((), (), {})

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy: the counts and settings. Results refer to gradients of the original."""
        memory = self._memory.__reduce__()
        fresh = {"losses": Losses(), "retries": 0, "_optimizers": [], "_results": []}
        return fresh | {
            "counters": self.counters.on_host(),
            "_memory": memory[0](*memory[1]),
            "_closed": Closed((), (), {}),
        }

    def begin(self, optimizer: Optimizer, device: torch.device) -> None:
        """Notes that an optimizer is about to be stepped: its weights are measured before its first step."""
        self._memory.begin([optimizer], device)

    def add(self, optimizer: Optimizer, state: dict[str, Any], scale: Tensor, stepped: Stepped) -> StepResult:
        """Returns the result of an optimizer's step, and keeps it until `update`.

        Args:
            optimizer: the optimizer.
            state: what was noted of its gradients.
            scale: the scale that made them.
            stepped: what is known of its step.
        """
        # A copy of its own: `update` writes to the scale in place, and the user may write to the result's.
        result = _result(optimizer, state, scale.clone(), stepped, self.losses)
        result.retries = self.retries
        self._optimizers.append(optimizer)
        self._results.append(result)
        return result

    def pending(self, found_inf: Tensor, scale: Tensor) -> list[StepResult]:
        """Returns the results since the last `update`, or one that stands for the steps of code that has none."""
        if self._results:
            return self._results
        loss_finite = self.losses.finite(scale.device)
        present, overflow = scale.clone(), host_value(found_inf)
        return [
            StepResult(
                applied=found_inf == 0,
                scale=present,
                next_scale=present,
                loss_finite=loss_finite,
                known=None if overflow is None else not overflow,
            )
        ]

    def close(self, results: list[StepResult], found_inf: Tensor, floor: float, at_floor: Any) -> None:
        """Counts the step that `update` has ended, and raises, warns or calls if the run is stuck.

        Args:
            results: those that `pending` returned before the scale was updated, with the next scale.
            found_inf: 0 unless a gradient was not finite.
            floor: lowest scale that is allowed.
            at_floor: whether the policy could not lower the scale, a leaf of its state.
        """
        optimizers = self._optimizers
        self._closed = Closed(optimizers, results, self.losses.kept())
        self.discard()
        last = results[-1]
        self.counters.count(found_inf, last.next_scale, last.scale, max(STUCK_AT, floor), at_floor)
        # The one that was skipped, where the host knows: its gradients were the cause.
        skipped = [result for result in results if result.known is False]
        self._memory.keep(skipped[-1] if skipped else last, self.counters, optimizers)

    def resume_losses(self) -> None:
        """Goes on with the losses of the steps that the last `update` has ended: more are taken on the same ones."""
        self.losses.resume(self._closed.losses)

    def reopen(self) -> None:
        """Puts the steps that the last `update` has ended before those since then, and takes its count back."""
        self._optimizers = [*self._closed.optimizers, *self._optimizers]
        self._results = [*self._closed.results, *self._results]
        self.counters.uncount()

    def discard(self) -> None:
        """Forgets the steps since the last `update`."""
        self._optimizers, self._results = [], []
        self.retries = 0
        self.losses.clear()

    def restart(self, counters: Counters) -> None:
        """Forgets every step, and continues from `counters`."""
        self.discard()
        self._memory.forget()
        self.counters = counters

    def metrics(self) -> dict[str, float]:
        """Returns the newest numbers known on the host. Never synchronizes."""
        return self._memory.metrics(self.counters)

    def health(self, scaling: bool, multiplies: bool) -> Health:
        """Returns how the run is doing. Synchronizes with the device."""
        return self._memory.health(self.counters, scaling=scaling, in_bf16=False, multiplies=multiplies)

    def text(self, name: str, about: Sequence[str], scale: Any, last: StepResult | None) -> str:
        """Returns the scaler as text: its `name`, `about`, scale, counts and last status. Never synchronizes."""
        skipped = shown(self.counters.skipped)
        # The applied steps are computed on the device if the skipped ones are counted there.
        applied = skipped if isinstance(skipped, str) else self.counters.applied
        state = SimpleNamespace(scale=scale, applied=applied, skipped=skipped)
        return scaler_text(name, about, state, last, shown)


def _result(optimizer: Optimizer, state: dict[str, Any], scale: Tensor, stepped: Stepped, losses: Losses) -> StepResult:
    _, gate, measured, applied = stepped
    found = state["sizes"][0].amax if "sizes" in state else None
    amax = None if found is None else found * scale.reciprocal()
    # Finite gradients are applied whatever the loss was, as in torch: where they are known to be, it is not needed.
    applies = bool(applied) and host_value(gate) is not None
    known = gate if applies else state.get("loss_finite")
    counted = measured.sizes if measured is not None and applied is False else None
    traces = None if applied else state.get("traces") or Traces(collect([optimizer]), counted)
    return StepResult(
        applied=gate,
        scale=scale,
        next_scale=scale,
        loss_finite=losses.finite(scale.device) if known is None else known,
        grad_norm=state.get("grad_norm"),
        amax=amax if amax is None or applies else torch.where(gate, amax, torch.inf),
        attempted=bool(state["found_inf_per_device"]),
        sizes=None if measured is None else measured.sizes,
        traces=traces,
        gradient_count=state.get("count", 0),
        known=applied,
    )
