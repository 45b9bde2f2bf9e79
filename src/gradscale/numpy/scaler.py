"""`LossScaler`: the five stages of a training step, for gradients in numpy arrays."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from gradscale.engine.decide import check_clip
from gradscale.engine.hints import explains_arguments
from gradscale.engine.host_scaler import HostScaler
from gradscale.engine.measurement import NOTHING_READ
from gradscale.engine.plan import Plan
from gradscale.numpy.agree import agree
from gradscale.numpy.apply import apply
from gradscale.numpy.measure import measure
from gradscale.numpy.remember import StepResult
from gradscale.numpy.tree import WIDE, FloatArray, named_arrays
from gradscale.recording.writer import RunRecorder


class LossScaler(HostScaler):
    """Scales a loss; unscales, checks and clips its gradients; and updates the scale.

    >>> from gradscale import Dynamic
    >>> scaler = LossScaler(Dynamic(init_scale=1024.0))
    >>> result = scaler.step({"weight": np.float16([512, -256])})
    >>> result.applied, result.grads["weight"].tolist()
    (True, [0.5, -0.25])
    >>> result = scaler.step({"weight": np.float16([np.inf, 1])})
    >>> result.applied, result.next_scale, result.culprits()
    (False, 512.0, [Culprit(name='weight', kind='inf', count=1)])

    Args:
        policy: the rule for the scale, or its name as on the command line, such as `"dynamic:growth_interval=100"`.
            `"auto"` is `Headroom()`, which follows the gradients of an FP16 run.
        state: the state to continue from, as `gradscale.import_state` returns it; by default the policy's start.
        max_consecutive_skips: skipped steps in a row, with no lower scale left to try, before the run is stuck.
        on_stuck: `"raise"` a `ScaleStuck` at every step, or once until a step is applied again: `"warn"` with its text,
            or call a function with it. `"ignore"` does nothing.
        record: what the run is recorded in: the path of a file, a logger, or a list of them, as in
            `gradscale.recording`.
    """

    _adapter: ClassVar[str] = "numpy"
    _losses_finite: bool
    _last_loss_finite: bool

    def scale(self, loss: Any) -> Any:
        """Returns `loss` times the scale, in float32 or wider. A loss that is not finite skips the next `step`.

        It does not if another loss follows that is finite, and all gradients of the step are: its batch was abandoned.
        A narrower loss is widened first: the default scale, 65536, does not fit into float16.
        """
        values = _checked(loss)
        wide = WIDE[values.dtype.name]
        self._last_loss_finite = bool(np.isfinite(values).all())
        self._losses_finite = self._losses_finite and self._last_loss_finite
        with np.errstate(over="ignore"):
            return values.astype(wide)[()] * wide(self.loss_scale)

    @explains_arguments("scaler.step")
    def step(self, grads: Any, clip_norm: float | None = None, loss: Any = None, *, norm: bool = False) -> StepResult:
        """Returns the gradients to apply, unscaled and clipped, or none if one is inf or NaN; and updates the scale.

        Reads each array once, and once more to make the gradients returned. Those given are not changed. When an
        argument is refused, nothing has changed.

        Args:
            grads: an array, or lists, tuples and dicts of them; None stands for a parameter without a gradient.
            clip_norm: bound on the norm of all gradients together, unscaled.
            loss: the unscaled loss, or losses, where `scale` was not called with them. A loss that is not finite skips
                the step and leaves the scale as it is: no lower scale would help.
            norm: measure the norm for the result even if nothing is clipped.
        """
        check_clip("clip_norm", clip_norm)
        arrays = named_arrays(grads)
        last_loss_finite = self._last_loss_finite if loss is None else bool(np.isfinite(_checked(loss)).all())
        if not arrays:
            nothing = self._no_grads(StepResult)
            self._remember(self._state, nothing)
            return nothing
        plan = Plan.of(self._policy, norm=norm, clip_norm=clip_norm)
        reads = plan.checks or plan.norm
        measured = [measure(array, self.loss_scale, plan) for _, array in arrays] if reads else []
        measurement = agree(measured, plan) if reads else NOTHING_READ
        outcome, result = self._decide(
            StepResult,
            measurement,
            loss_finite=self._losses_finite and last_loss_finite,
            last_loss_finite=last_loss_finite,
            clip_norm=clip_norm,
            names=tuple(name for name, _ in arrays),
            counts=tuple(one.nonfinite for one in measured),
        )
        result.factor = float(outcome.factor)
        unscaled = apply(grads, result.factor) if result.applied else None
        self._remember(outcome.state, result)
        # `scaler.last` has no gradients: they would stay in memory until the next step.
        return replace(result, grads=unscaled)

    @staticmethod
    def _recorder_of(record: Any) -> RunRecorder:
        return RunRecorder(record, "numpy")

    def _reset(self) -> None:
        self._losses_finite = self._last_loss_finite = True


def _checked(loss: Any) -> FloatArray:
    """Returns `loss` as an array; raises if it is not a real floating-point number, or an array of them."""
    values: FloatArray = np.asarray(loss)
    if values.dtype.name not in WIDE or values.dtype.kind == "c":
        raise TypeError(
            f"`loss` must be a floating-point number or array. Received: loss={loss!r} ({values.dtype.name})."
        )
    return values
