"""`LossScaler`: the scale of one trainer, its state and its last result."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gradscale.engine.decide import Outcome, check_clip
from gradscale.engine.health import Weights
from gradscale.engine.host_scaler import HostScaler
from gradscale.engine.plan import Plan
from gradscale.engine.result import StepResult
from gradscale.engine.saved import read_file
from gradscale.mxnet.agree import Observation, observe
from gradscale.mxnet.checks import check_loss
from gradscale.mxnet.gradients import Gradients, multiply
from gradscale.mxnet.remember import Losses
from gradscale.policies.contract import ScaleState
from gradscale.policies.static import multiplies
from gradscale.recording.writer import RunRecorder


class LossScaler(HostScaler):
    """Scales losses; checks, unscales and clips their gradients; and updates the scale.

    `init_trainer` makes one, and the trainer calls it. Values are plain numbers: like MXNet's own amp, it reads a flag
    to the host at every step.
    """

    _adapter: ClassVar[str] = "mxnet"
    _clip_norm: float | None = None
    _losses: Losses
    _before_unscale: Observation | None
    _unscaled: Gradients
    """Gradients that `unscale` has divided, and no step has used yet."""

    @property
    def clip_norm(self) -> float | None:
        """Bound on the norm of all gradients together, unscaled and divided by the size of the batch; None for none."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, bound: float | None) -> None:
        check_clip("clip_norm", bound)
        self._clip_norm = bound

    def check_scaled(self, caller: str) -> None:
        """Raises if no loss was scaled since the last step: unscaled gradients would be divided too."""
        if self._policy.needs and not self._losses.given:
            raise RuntimeError(
                f"`{caller}` needs gradients of a scaled loss. Received: gradients, but no call of `scale_loss` since "
                "the last step. Run the backward pass of what `with scale_loss(loss, trainer) as scaled:` yields."
            )

    def scale(self, loss: Any) -> Any:
        """Returns `loss` times the scale, or a list of losses times it. Does not synchronize.

        A loss that is not finite skips the next step, unless finite losses of another call follow and all gradients of
        the step are finite: its batch was abandoned.

        Gradients that `unscale` has divided, and no step has used, are scaled again, so that those of this loss can be
        added.
        """
        losses = loss if isinstance(loss, list | tuple) else [loss]
        for one in losses:
            check_loss(one, self._policy)
        if multiplies(self._policy):
            multiply(self._unscaled, self.loss_scale)
        self._unscaled = ()
        if self._unscaled_finite:  # an overflow is not forgotten
            self._before_unscale = None
        if self._policy.needs and losses:
            self._losses.add(losses)
        scaled = [one * self.loss_scale for one in losses] if multiplies(self._policy) else list(losses)
        return scaled if losses is loss else scaled[0]

    def unscale(self, gradients: Gradients) -> None:
        """Measures gradients, then divides them by the scale in place. The next step uses this measurement too.

        Raises:
            RuntimeError: they were divided already.
        """
        if self._unscaled:
            raise RuntimeError("Gradients are unscaled once per step. `unscale` was called before; remove one call.")
        observation = self._observe(gradients, self.loss_scale, 1.0)
        if multiplies(self._policy):
            multiply(gradients, 1.0 / self.loss_scale)
        if self._before_unscale is None:  # an earlier one is kept only if it overflowed, and still counts
            self._before_unscale = observation
        self._unscaled = gradients

    def flags(self) -> tuple[bool, bool, bool]:
        """Returns what only this worker knows; synchronizes with the device.

        Whether all losses since the last step were finite, whether those of the last `scale` were, and whether all
        gradients that `unscale` measured were.
        """
        return *self._losses.finite(), self._unscaled_finite

    @property
    def _unscaled_finite(self) -> bool:
        return self._before_unscale is None or self._before_unscale.finite

    def decide(self, gradients: Gradients, rescale: float, flags: Sequence[bool]) -> tuple[Outcome, StepResult]:
        """Returns the decision and the result of the step. Changes nothing: `remember` does, once the step is done.

        `rescale` is what the optimizer multiplies gradients by, usually one over the size of the batch. The flags are
        those of `flags`, on all workers.
        """
        if not any(gradients):
            return Outcome(self._state, np.bool_(False), np.float32(0)), self._no_grads(StepResult)
        losses_finite, last_losses_finite, unscaled_finite = flags
        divisor = 1.0 if self._unscaled else self.loss_scale
        observation = self._observe(gradients, divisor, rescale)
        if self._before_unscale is not None:
            observation = _after_unscale(observation, self._before_unscale, self.loss_scale)
        return self._decide(
            StepResult,
            observation.measurement,
            loss_finite=losses_finite,
            last_loss_finite=last_losses_finite,
            divisor=divisor,
            clip_norm=self.clip_norm,
            overflowed=not unscaled_finite,
            names=observation.names,
            counts=observation.counts,
        )

    def remember(self, state: ScaleState, result: StepResult, weights: Callable[[], Weights | None]) -> None:
        """Stores the state and the result of a step that is done. `weights` measures the weights for a report.

        Raises:
            ScaleStuck: the run is stuck. It names the parameters, and the likely cause.
        """
        self._remember(state, result, weights)

    def save(self, path: str | Path) -> None:
        """Writes `state_dict` to a JSON file, all of it or nothing."""
        # JSON, not the pickle that `Trainer.save_states` writes. `os.replace` is atomic.
        part = Path(f"{path}.part")
        part.write_text(json.dumps(self.state_dict(), indent=2, allow_nan=False) + "\n")
        os.replace(part, path)

    def load(self, path: str | Path) -> None:
        """Loads what `save` wrote.

        Raises:
            ValueError: the file is not as `save` wrote it. Nothing has changed then.
        """
        self._load(read_file(path))

    def _observe(self, gradients: Gradients, divisor: float, rescale: float) -> Observation:
        return observe(gradients, Plan.of(self._policy, clip_norm=self.clip_norm), divisor=divisor, rescale=rescale)

    @staticmethod
    def _recorder_of(record: Any) -> RunRecorder:
        return RunRecorder(record, "mxnet")

    def _reset(self) -> None:
        self._losses = Losses()
        self._before_unscale = None
        self._unscaled = ()


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def _after_unscale(now: Observation, before: Observation, scale: float) -> Observation:
    """Returns one observation for gradients that were measured, divided by the scale, and possibly edited."""
    # An overflow before the edit counts even if the edit removed it. Magnitudes are those before it, as they must fit
    # the format; the norm is that after it, as the edited gradients are applied.
    named = now if before.finite else before
    amax = before.measurement.amax
    measurement = now.measurement._replace(
        sizes=named.measurement.sizes,
        amax=None if amax is None else amax / np.float32(scale),
        upper_share=before.measurement.upper_share,
    )
    return Observation(measurement, named.names, named.counts)
