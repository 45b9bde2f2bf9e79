"""The part of a scaler that needs no kernel, for adapters that decide in host memory: decide, remember, save."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from gradscale._text import scaler_text
from gradscale.engine.decide import Outcome
from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, OnStuck, StuckCheck, Weights
from gradscale.engine.hints import OtherNames, explains_arguments
from gradscale.engine.host import decide_on_host
from gradscale.engine.measurement import UNREAD, Measurement
from gradscale.engine.metrics import host_metrics, summary_of
from gradscale.engine.result import StepResult
from gradscale.engine.saved import Saved, check_state, note_policy, read_saved, replaces_policy, write_saved
from gradscale.formats import FP32
from gradscale.peers.specs import as_policy
from gradscale.policies.contract import Policy, ScaleState
from gradscale.record import settings_text

R = TypeVar("R", bound=StepResult)


class HostScaler(OtherNames, ABC):
    """A policy, its state and the last result. An adapter's scaler adds the stages that read or write gradients.

    Args:
        policy: the rule for the scale, or its name as on the command line, such as `"dynamic:growth_interval=100"`.
            `"auto"` is `Headroom()`, which follows the gradients of an FP16 run.
        state: the state to continue from, as `gradscale.import_state` returns it; by default the policy's start.
        max_consecutive_skips: skipped steps in a row before the run is stuck, if no lower scale is left by then.
        on_stuck: `"raise"` a `ScaleStuck` at every step, or once until a step is applied again: `"warn"` with its text,
            or call a function with it. `"ignore"` does nothing.
        record: what the run is recorded in: the path of a file, a logger, or a list of them, as in
            `gradscale.recording`.
    """

    @explains_arguments("LossScaler(policy={})")
    def __init__(
        self,
        policy: Policy | str = "auto",
        state: ScaleState | None = None,
        *,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        on_stuck: OnStuck = "raise",
        record: Any = None,
    ) -> None:
        self._policy = as_policy(policy)
        self._state: ScaleState = self._policy.start() if state is None else state
        check_state(self._policy, self._state)
        self._stuck_check = StuckCheck(max_consecutive_skips, on_stuck)
        self._recorder = self._recorder_of(record)
        self._seen = UNREAD
        self._last: StepResult | None = None
        self._last_finite_loss: int | None = None
        self._reset()

    def __repr__(self) -> str:
        """Returns policy, scale, counts and the status of the last step as text."""
        return scaler_text(
            type(self).__name__, [settings_text(self._policy)], self._state, self._last, lambda number: number.item()
        )

    @property
    def policy(self) -> Policy:
        """The rule for the scale."""
        return self._policy

    @property
    def state(self) -> ScaleState:
        """The state of the scale: its value, and the counters."""
        return self._state

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(self._state.scale)

    @property
    def last(self) -> StepResult:
        """The result of the last step, without the gradients.

        Raises:
            RuntimeError: no step was taken yet.
        """
        if self._last is None:
            raise RuntimeError("There is a result once a step was taken. Call `step` first.")
        return self._last

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate, and the norm and headroom of the last step; NaN where one is not known.

        `headroom_bits` is how often the scale could double before the largest gradient overflows FP16.
        """
        norm, amax = (None, None) if self._last is None else (self._last.grad_norm, self._last.amax)
        return host_metrics(self._state, norm, amax)

    def note(self, **numbers: Any) -> None:
        """Notes numbers of yours, such as `loss=0.5`, for the record of the step that comes next."""
        step = int(self._state.applied) + int(self._state.skipped)
        self._recorder.note(step, {name: float(number) for name, number in numbers.items()})

    def summary(self) -> str:
        """Returns scale and skips as a short text for a progress bar, as in `scale 2^14, 3 skipped`."""
        return summary_of(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the policy and its state as plain values that go through JSON: enough to continue bit-exactly."""
        return write_saved(self._policy, self._state)

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        """Loads the policy and the state that `state_dict` returned.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: a key is missing or unknown, or a value is out of range. Nothing has changed then.
        """
        self._load(read_saved(mapping))

    def _load(self, saved: Saved) -> None:
        note_policy(self._policy, saved.policy)
        if not replaces_policy(self._policy, saved.policy):
            return
        self._policy, self._state, self._last = saved.policy, saved.state, None
        self._last_finite_loss = None
        self._stuck_check.reported = False
        self._reset()

    def _decide(
        self,
        kind: type[R],
        measurement: Measurement,
        *,
        loss_finite: bool,
        last_loss_finite: bool = False,
        divisor: float | None = None,
        clip_norm: float | None = None,
        overflowed: bool = False,
        **fields: Any,
    ) -> tuple[Outcome, R]:
        """Returns the decision of the step, and its result of the class `kind`. Changes nothing: the update may fail.

        `loss_finite` is that of all losses since the last step. One that is not finite does not count where the last
        loss and all gradients are: its batch was abandoned, or its gradients would not be finite. Gradients are divided
        by `divisor`, by default the scale. `overflowed` reports gradients that are not in the measurement. `fields` are
        further fields of the result.
        """
        divisor = self.loss_scale if divisor is None else divisor
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # gradients that are not finite
            seen = measurement.seen(np.float32(divisor), np.bool_(loss_finite), np, np.bool_(overflowed))
        loss_finite = loss_finite or (last_loss_finite and bool(seen.finite))
        # Rules are bit-exact in float32. A float64 gradient may be larger than that holds, and still be finite.
        amax = np.float32(min(seen.amax, FP32.max) if seen.finite else np.inf)
        facts = self._seen = replace(seen, amax=amax, loss_finite=np.bool_(loss_finite))
        outcome = decide_on_host(self._policy, self._state, facts, clip_norm, divisor)
        return outcome, kind(
            applied=bool(outcome.applied),
            scale=self.loss_scale,
            next_scale=float(outcome.state.scale),
            loss_finite=loss_finite,
            grad_norm=None if measurement.norm is None else float(seen.norm),
            amax=None if measurement.amax is None else float(seen.amax),
            sizes=measurement.sizes,
            **fields,
        )

    def _no_grads(self, kind: type[R]) -> R:
        """Returns the result of a step without gradients, which changes nothing."""
        return kind(applied=False, scale=self.loss_scale, next_scale=self.loss_scale, attempted=False)

    def _remember(
        self, state: ScaleState, result: StepResult, weights: Callable[[], Weights | None] | None = None
    ) -> None:
        """Stores the state and the result of a step that was taken, and checks whether the run is stuck.

        `weights` measures the weights for the report, where the adapter knows them.

        Raises:
            ScaleStuck: the run is stuck, and `on_stuck` is `"raise"`. The step has been counted then.
        """
        share = self._seen.upper_share if "upper_share" in self._policy.needs else None
        self._recorder.add_result(self._policy, self._state, state, result, share)
        self._state, self._last = state, result
        self._reset()
        if result.loss_finite:
            self._last_finite_loss = int(state.applied) + int(state.skipped)

        def known() -> dict[str, Any]:
            return {"last_finite_loss": self._last_finite_loss, "weights": None if weights is None else weights()}

        self._stuck_check.check(state, result, result.loss_finite, known)

    @staticmethod
    @abstractmethod
    def _recorder_of(record: Any) -> Any:
        """Returns the recorder that writes to `record`, of which the engine knows nothing."""

    @abstractmethod
    def _reset(self) -> None:
        """Starts a new step: clears what an adapter stores between a loss and its step.

        Called by the constructor, after every step and after every load.
        """
