"""`LossScaler`: the five rooms of a training step, for gradients in numpy arrays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradscale.engine.decide import check_clip
from gradscale.engine.host import decide_on_host
from gradscale.engine.metrics import metrics_of
from gradscale.engine.result import Status
from gradscale.engine.saved import check_state, read_saved, write_saved
from gradscale.numpy.apply import apply
from gradscale.numpy.checks import checked_loss
from gradscale.numpy.measure import Measured, agree, measure
from gradscale.numpy.result import Culprit, StepResult
from gradscale.numpy.tree import WIDE, FloatArray, named_arrays
from gradscale.policies.contract import Policy, ScaleState, check_policy
from gradscale.policies.dynamic import Dynamic

DEFAULT_POLICY = Dynamic()


class LossScaler:
    """Scales a loss; unscales, checks and clips the gradients that come of it; and moves the scale.

    >>> scaler = LossScaler(Dynamic(init_scale=1024.0))
    >>> result = scaler.step({"weight": np.float16([512, -256])})
    >>> result.applied, result.grads["weight"].tolist()
    (True, [0.5, -0.25])
    >>> result = scaler.step({"weight": np.float16([np.inf, 1])})
    >>> result.applied, result.next_scale, result.culprits[0].name
    (False, 512.0, 'weight')

    Args:
        policy: the rule for the scale.
        state: where to go on, as `gradscale.import_state` returns it; by default the policy's start.
    """

    def __init__(self, policy: Policy = DEFAULT_POLICY, state: ScaleState | None = None) -> None:
        check_policy(policy)
        self._policy = policy
        self._state: ScaleState = policy.start() if state is None else state
        check_state(policy, self._state)
        self._losses_finite = True
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
        """What the next loss is to be multiplied by: the number to start a hand-written backward pass with."""
        return float(self._state.scale)

    def scale(self, loss: Any) -> Any:
        """Returns `loss` times the scale, in float32 or wider, and remembers until the next `step` if it is not finite.

        A narrower loss is widened first: the default scale, 65536, does not fit into float16.
        """
        values = checked_loss(loss)
        wide = WIDE[values.dtype.name]
        self._losses_finite = self._losses_finite and bool(np.isfinite(values).all())
        with np.errstate(over="ignore"):
            return values.astype(wide)[()] * wide(self.loss_scale)

    def step(self, grads: Any, clip_norm: float | None = None, loss: Any = None, *, norm: bool = False) -> StepResult:
        """Returns the gradients to apply, unscaled and clipped, or none if one was inf or NaN; and moves the scale.

        Each array is read once, and once more to make the gradients returned. Those given are left as they are. When
        something is wrong with an argument, nothing has changed.

        Args:
            grads: an array, or lists, tuples and dicts of them; None stands for a parameter without a gradient.
            clip_norm: bound on the norm of all gradients together, in true units.
            loss: the unscaled loss, or losses, where `scale` has not seen them. A loss that is not finite skips the
                step and leaves the scale alone: no scale could have helped.
            norm: measure the norm for the result even if nothing is clipped.
        """
        check_clip("clip_norm", clip_norm)
        arrays = named_arrays(grads)
        loss_finite = self._losses_finite and (loss is None or bool(np.isfinite(checked_loss(loss)).all()))
        if not arrays:
            return self._remember(self._state, _no_grads(self.loss_scale))
        norm = norm or clip_norm is not None
        measured = self._measure(arrays, norm=norm)
        seen = agree([one for _, one in measured], loss_finite=loss_finite)
        outcome = decide_on_host(self._policy, self._state, seen, clip_norm)
        unscaled = apply(grads, float(outcome.factor)) if outcome.applied else None
        result = StepResult(
            status=Status.of(outcome.applied, seen.loss_finite),
            grads=unscaled,
            factor=float(outcome.factor),
            scale=self.loss_scale,
            next_scale=float(outcome.state.scale),
            grad_norm=float(seen.norm) if norm else None,
            amax=max((one.amax for _, one in measured), default=None),
            culprits=tuple(Culprit(name, one.infs, one.nans) for name, one in measured if not one.finite),
        )
        return self._remember(outcome.state, result)

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate, and the last step's true norm and headroom: NaN where there is none.

        `headroom_bits` is how often the scale could double before the largest gradient overflows FP16.
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
        self._losses_finite = True
        self._last = None

    def _measure(self, arrays: Sequence[tuple[str, FloatArray]], *, norm: bool) -> list[tuple[str, Measured]]:
        """Returns what was found in each array; nothing where neither the policy nor the caller wants to know."""
        if not norm and not self._policy.needs:
            return []
        with _any_scale():
            unscale = float(1.0 / self._state.scale)
        edge: float = getattr(self._policy, "edge_magnitude", math.inf)
        return [(name, measure(array, unscale, norm=norm, edge=edge)) for name, array in arrays]

    def _remember(self, state: ScaleState, result: StepResult) -> StepResult:
        self._state = state
        self._last = replace(result, grads=None)  # they are as large as the model, and the caller's to keep
        self._losses_finite = True
        return result


def _any_scale() -> np.errstate:
    """Returns a context for scales down to 0, which some other systems' rules reach: the gate stays shut there."""
    return np.errstate(divide="ignore", over="ignore", invalid="ignore")


def _no_grads(scale: float) -> StepResult:
    return StepResult(Status.NO_GRADS, None, 0.0, scale, scale, None, None, ())
