"""`LossScaler`: the scale of one trainer, and what it remembers."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gradscale.decide import check_clip
from gradscale.formats import FP16
from gradscale.mxnet.gradients import Gradients
from gradscale.mxnet.look import Look, look
from gradscale.mxnet.losses import Losses, check_loss
from gradscale.mxnet.result import StepResult
from gradscale.numpy.rule import decide_on_host
from gradscale.policy import Policy, check_count, check_policy
from gradscale.saved import read_saved, write_saved
from gradscale.state import ScaleState, Seen, Status
from gradscale.stuck import MAX_CONSECUTIVE_SKIPS, ScaleStuck, likely_cause


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
        self._early: Look | None = None  # at gradients that `unscale` has divided
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
        """Returns `loss` times the scale, and remembers until the next step if it is not finite. Does not wait."""
        check_loss(loss, self._policy)
        if self._policy.needs:
            self._losses.add(loss)
        return loss * self.loss_scale

    @np.errstate(divide="ignore")  # a scale of 0, which MXNet's own rule may reach, skips the step
    def unscale(self, gradients: Gradients) -> None:
        """Divides gradients by the scale, in place. What is seen of them now counts in the step that follows.

        Raises:
            RuntimeError: they were divided already.
        """
        if self._early is not None:
            raise RuntimeError("Gradients are unscaled once per step. `unscale` was called before; remove one call.")
        self._early = self._look(gradients, self.loss_scale, 1.0)
        factor = float(np.divide(1.0, self.loss_scale))
        for slots in gradients:
            for slot in slots:
                slot.multiply(factor)

    def losses_finite(self) -> bool:
        """Returns whether all losses since the last step were finite, on this worker. Waits for the device."""
        return self._losses.finite()

    def take(self, gradients: Gradients, rescale: float, *, loss_finite: bool) -> float | None:
        """Returns what the optimizer shall multiply the gradients by, or None if it shall leave them; moves the scale.

        Args:
            gradients: all that are to be applied.
            rescale: what the optimizer would multiply true gradients by: one over the size of the batch, usually.
            loss_finite: whether all losses since the last step were finite, on all workers.
        """
        if not any(gradients):
            return self._remember(Status.NO_GRADS, self._state, Look(Seen(), (), None, None))
        unit = self.loss_scale if self._early is None else 1.0
        found = self._look(gradients, unit, rescale)
        found = found if self._early is None else found.after(self._early)
        seen = replace(found.seen, loss_finite=np.bool_(loss_finite))
        outcome = decide_on_host(self._policy, self._state, seen, self.clip_norm)
        if not outcome.applied:
            return self._remember(Status.OVERFLOW if loss_finite else Status.NONFINITE_LOSS, outcome.state, found)
        factor = rescale * float(outcome.factor) * (self.loss_scale / unit)
        self._remember(Status.APPLIED, outcome.state, found)
        return factor

    def check_stuck(self, parameters: int) -> None:
        """Raises if the last step was one skip too many: no lower scale is left to try, or the loss is not finite.

        Args:
            parameters: how many parameters had gradients.

        Raises:
            ScaleStuck: it names the parameters to blame, and the likely cause.
        """
        skips, status = int(self._state.consecutive_skips), self.last.status
        no_way_down = status is Status.OVERFLOW and bool(self._state.stuck)
        if skips >= self._max_consecutive_skips and (no_way_down or status is Status.NONFINITE_LOSS):
            culprits = self.last.culprits()
            raise ScaleStuck(skips, self.loss_scale, culprits, likely_cause(status, culprits, parameters))

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate, and the last step's true norm and headroom: NaN where there is none.

        `headroom_bits` is how often the scale could double before the largest gradient overflows FP16. It is known only
        with policies that look at the largest gradient.
        """
        applied, skipped = float(self._state.applied), float(self._state.skipped)
        norm = None if self._last is None else self._last.grad_norm
        return {
            "scale": self.loss_scale,
            "applied": applied,
            "skipped": skipped,
            "skip_rate": skipped / max(1.0, applied + skipped),
            "grad_norm": math.nan if norm is None else norm,
            "headroom_bits": _headroom_bits(self._last),
        }

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

    def _remember(self, status: Status, state: ScaleState, found: Look) -> None:
        scale, next_scale = self.loss_scale, float(state.scale)
        self._last = StepResult(status, scale, next_scale, found.norm, found.amax, found.culprits)
        self._state = state
        self._forget()

    def _forget(self) -> None:
        """Starts anew: no loss was given, and nothing was unscaled."""
        self._losses.forget()
        self._early = None


def _headroom_bits(last: StepResult | None) -> float:
    if last is None or not last.applied or not last.amax:
        return math.nan
    return math.log2(FP16.max) - math.log2(last.amax) - math.log2(last.scale)
