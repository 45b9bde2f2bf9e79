"""`LossScaler`: the scale of one trainer, and what it remembers."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gradscale.engine.decide import check_clip
from gradscale.engine.host import decide_on_host
from gradscale.engine.metrics import metrics_of
from gradscale.engine.result import Status
from gradscale.engine.saved import read_saved, write_saved
from gradscale.engine.stuck import MAX_CONSECUTIVE_SKIPS, check_stuck
from gradscale.mxnet.gradients import Gradients, multiply
from gradscale.mxnet.look import Look, look
from gradscale.mxnet.losses import Losses, check_loss
from gradscale.mxnet.result import Decision, StepResult
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, ScaleState, check_policy


class LossScaler:
    """Multiplies losses; checks and clips the gradients that come of them; and moves the scale.

    `init_trainer` makes one and lets the trainer drive it.

    Args:
        policy: the rule for the scale.
        clip_norm: bound on the norm of all gradients together, as the optimizer sees them.
        max_consecutive_skips: skipped steps in a row after which a run may be stuck.
    """

    def __init__(
        self,
        policy: Policy,
        clip_norm: float | None = None,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
    ) -> None:
        check_policy(policy)
        check_count("max_consecutive_skips", max_consecutive_skips)
        self._policy = policy
        self._max_consecutive_skips = max_consecutive_skips
        self._state: ScaleState = policy.start()
        self.clip_norm = clip_norm
        self._losses = Losses()
        self._early: Look | None = None  # of `unscale`, at gradients before it divided them
        self._divided: Gradients = ()  # by `unscale`, and used by no step yet
        self._last: StepResult | None = None

    @property
    def policy(self) -> Policy:
        """The rule for the scale."""
        return self._policy

    @property
    def state(self) -> ScaleState:
        """Everything the scale remembers: its value, and the counters."""
        return self._state

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(self._state.scale)

    @property
    def clip_norm(self) -> float | None:
        """Bound on the norm of all gradients together, unscaled and divided by the size of the batch; None for none."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, bound: float | None) -> None:
        check_clip("clip_norm", bound)
        self._clip_norm = bound

    @property
    def last(self) -> StepResult:
        """What became of the last step.

        Raises:
            RuntimeError: there was none yet.
        """
        if self._last is None:
            raise RuntimeError("There is a result once a step was taken. Call `trainer.step(batch_size)` first.")
        return self._last

    @property
    def waits_for_loss(self) -> bool:
        """Whether gradients that come now cannot have been scaled: no loss was multiplied since the last step."""
        return bool(self._policy.needs) and not self._losses.given

    def scale(self, loss: Any) -> Any:
        """Returns `loss` times the scale, and remembers until the next step if it is not finite. Does not wait.

        Gradients that `unscale` has divided, and no step has used, are scaled again: those of this loss will join them.
        """
        check_loss(loss, self._policy)
        self._scale_again()
        if self._policy.needs:
            self._losses.add(loss)
        return loss * self.loss_scale

    @np.errstate(divide="ignore")  # a scale of 0, which MXNet's own rule may reach, skips the step
    def unscale(self, gradients: Gradients) -> None:
        """Divides gradients by the scale, in place. What is seen of them now counts in the step that follows.

        Raises:
            RuntimeError: they were divided already.
        """
        if self._divided:
            raise RuntimeError("Gradients are unscaled once per step. `unscale` was called before; remove one call.")
        found = self._look(gradients, self.loss_scale, 1.0)
        multiply(gradients, float(np.divide(1.0, self.loss_scale)))
        self._early = found if self._early is None else found.after(self._early)
        self._divided = gradients

    def losses_finite(self) -> bool:
        """Returns whether all losses since the last step were finite, on this worker. Waits for the device."""
        return self._losses.finite()

    def unscaled_finite(self) -> bool:
        """Returns whether `unscale` found nothing but finite gradients since the last step, on this worker."""
        return self._early is None or bool(self._early.seen.finite)

    def decide(self, gradients: Gradients, rescale: float, *, losses_finite: bool, unscaled_finite: bool) -> Decision:
        """Returns what shall become of the step. Changes nothing: that is for `remember`, once it has come to pass.

        Args:
            gradients: all that are to be applied.
            rescale: what the optimizer would multiply true gradients by: one over the size of the batch, usually.
            losses_finite: whether all losses since the last step were finite, on all workers.
            unscaled_finite: whether `unscale` found nothing but finite gradients, on all workers.
        """
        unit = 1.0 if self._divided else self.loss_scale
        found = self._look(gradients, unit, rescale)
        if not any(gradients):
            return self._decision(Status.NO_GRADS, self._state, found, 0.0)
        found = found if self._early is None else found.after(self._early)
        finite = np.logical_and(found.seen.finite, unscaled_finite)
        seen = replace(found.seen, finite=finite, loss_finite=np.bool_(losses_finite))
        outcome = decide_on_host(self._policy, self._state, seen, self.clip_norm)
        status = Status.of(outcome.applied, losses_finite)
        factor = rescale * float(outcome.factor) * (self.loss_scale / unit) if outcome.applied else 0.0
        return self._decision(status, outcome.state, found, factor)

    def remember(self, decision: Decision) -> None:
        """Moves the scale, counts the step, and starts anew: no loss was given, and nothing was unscaled."""
        self._last, self._state = decision.result, decision.state
        self._forget()

    def check_stuck(self, parameters: int) -> None:
        """Raises if the last step was one skip too many: no lower scale is left to try, or the loss is not finite.

        Args:
            parameters: how many parameters had gradients.

        Raises:
            ScaleStuck: it names the parameters to blame, and the likely cause.
        """
        check_stuck(self._state, self._max_consecutive_skips, self.last, parameters)

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate, and the last step's true norm and headroom: NaN where there is none.

        `headroom_bits` is how often the scale could double before the largest gradient overflows FP16. It is known only
        with policies that look at the largest gradient.
        """
        return metrics_of(self._state, self._last)

    def state_dict(self) -> dict[str, Any]:
        """Returns the policy and its state as plain values that go through JSON: all it takes to go on bit for bit."""
        return write_saved(self._policy, self._state)

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        """Takes over the policy and the state that `state_dict` wrote.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: a key is missing or unknown, or a value is out of range. Nothing has changed then.
        """
        self._policy, self._state = read_saved(mapping)
        self._last = None
        self._forget()

    def save(self, path: str | Path) -> None:
        """Writes `state_dict` to a JSON file, all of it or nothing."""
        part = Path(f"{path}.part")
        part.write_text(json.dumps(self.state_dict(), indent=2, allow_nan=False) + "\n")
        os.replace(part, path)

    def load(self, path: str | Path) -> None:
        """Takes over what `save` wrote.

        Raises:
            ValueError: the file is not as `save` wrote it. Nothing has changed then.
        """
        try:
            mapping = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"`path` must name a JSON file that `save` wrote. Received: {path} ({error}).") from error
        self.load_state_dict(mapping)

    def _look(self, gradients: Gradients, unit: float, rescale: float) -> Look:
        return look(gradients, self._policy, norm=self.clip_norm is not None, unit=unit, rescale=rescale)

    def _decision(self, status: Status, state: ScaleState, found: Look, factor: float) -> Decision:
        result = StepResult(status, self.loss_scale, float(state.scale), found.norm, found.amax, found.culprits)
        return Decision(result, state, factor)

    def _scale_again(self) -> None:
        """Takes `unscale` back, if no step has followed it. An overflow that it found is not forgotten."""
        multiply(self._divided, self.loss_scale)
        self._divided = ()
        self._early = None if self.unscaled_finite() else self._early

    def _forget(self) -> None:
        self._losses.forget()
        self._early = None
        self._divided = ()
