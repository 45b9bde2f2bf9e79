"""Measure: what a step reads of its gradients, and for whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np

from gradscale.engine.measurement import Measurement
from gradscale.engine.plan import Plan
from gradscale.formats import FP16
from gradscale.keras.backends import current
from gradscale.policies.contract import Policy, Seen
from gradscale.record import Array

BACKEND = current()


class Gradients(NamedTuple):
    """The gradients of a step and their variables.

    Attributes:
        grads: scaled gradients; None for a variable without one.
        variables: the variables.
    """

    grads: list[Any]
    variables: list[Any]

    @property
    def present(self) -> list[tuple[Any, Any]]:
        """The pairs of gradient and variable that have a gradient."""
        return [pair for pair in zip(*self, strict=True) if pair[0] is not None]


def overwrites(variable: Any) -> bool:
    """Returns whether the gradient of a variable is its next value, as with the scales of FP8 layers."""
    return getattr(variable, "overwrite_with_gradient", False)


@dataclass(frozen=True, slots=True)
class StepPlan(Plan):
    """What a step reads of the gradients, with what only Keras knows.

    Attributes:
        kinds: whether each gradient holds a NaN or only infinities.
        overwrites: for each gradient, whether it is the next value of its variable, which does not depend on the scale.
        half: for each gradient, whether its variable is stored in FP16, which the inner optimizer casts it to.
    """

    kinds: bool = False
    overwrites: tuple[bool, ...] = ()
    half: tuple[bool, ...] = ()


def plan_of(policy: Policy, gradients: Gradients, *, norm: bool, kinds: bool) -> StepPlan | None:
    """Returns the plan of a step; None where neither the policy nor the caller asks for anything."""
    plan, variables = Plan.of(policy, norm=norm), [variable for _, variable in gradients.present]
    if not variables or not (plan.checks or plan.norm):
        return None
    own = tuple(map(overwrites, variables))
    # Keras casts a gradient to the dtype of its variable. Divided by a scale below 1, a finite one may become inf.
    stored = [keras.backend.standardize_dtype(variable.dtype) for variable in variables]
    half = tuple(dtype == FP16.dtype_name and not is_own for dtype, is_own in zip(stored, own, strict=True))
    # The result of a custom loop has the largest magnitude.
    return StepPlan(plan.checks, plan.amax or kinds, plan.norm, plan.edge, kinds, own, half)


def measure(plan: StepPlan, grads: Sequence[Any], loss_finite: Any) -> Any:
    """Returns what the plan reads of the gradients, on all replicas together: a size of each, norm, share and loss.

    `loss_finite` is whether the loss was finite; None if that is not known. Does not synchronize with the device,
    except on torch.
    """
    values = [BACKEND.values(grad) for grad in grads]
    scaled = [value for value, is_own in zip(values, plan.overwrites, strict=True) if not is_own]
    others = [
        BACKEND.norm(scaled) if plan.norm and scaled else 0.0,
        BACKEND.share_above(scaled, plan.edge) if plan.edge is not None and scaled else 0.0,
        0.0 if loss_finite is None else keras.ops.logical_not(loss_finite),
    ]
    # Zeros for what is not read: collectives of a process share keys, and so one shape under any policy.
    rest = keras.ops.stack([keras.ops.cast(number, "float32") for number in others])
    sizes = BACKEND.sizes(values, peaks=plan.amax or any(plan.half), kinds=plan.kinds)
    return BACKEND.agree(keras.ops.concatenate([sizes, rest]))


def measured(plan: StepPlan, numbers: Any, scale: Array) -> tuple[Measurement, Seen]:
    """Returns what `measure` has found, as it is and unscaled."""
    sizes, norm, share, bad_loss = numbers[:-3], numbers[-3], numbers[-2], numbers[-1]

    def largest(chosen: Sequence[bool]) -> Array:
        arrays = BACKEND.ARRAYS
        # A maximum alone may lose a NaN.
        known = arrays.where(arrays.isfinite(sizes), sizes, np.inf)
        return arrays.max(arrays.where(np.array(chosen), known, 0.0))

    total = largest([not is_own for is_own in plan.overwrites])
    measurement = Measurement(
        sizes=sizes,
        total=total,
        amax=total if plan.amax else None,
        norm=norm if plan.norm else None,
        upper_share=None if plan.edge is None else share,
        half_amax=largest(plan.half) if any(plan.half) else None,
    )
    xp = BACKEND.XP
    overflowed = xp.logical_not(xp.isfinite(largest(plan.overwrites))) if any(plan.overwrites) else None
    return measurement, measurement.seen(scale, bad_loss == 0, xp, overflowed)


class Losses:
    """Whether the losses that were scaled since the last step were finite: of one replica or several, which agree."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._finite: Any = None

    def add(self, loss: Any) -> None:
        """Adds a loss. Does not synchronize with the device."""
        finite = all_finite(loss)
        owner = BACKEND.owner(finite)
        if self._finite is not None and owner is self._owner:
            finite = keras.ops.logical_and(self._finite, finite)
        self._owner, self._finite = owner, finite

    def take(self, gradients: Gradients) -> Any:
        """Returns whether the losses of `gradients` were finite, and forgets them; None if that is not known.

        It is not where one function that is compiled has scaled the loss and another one applies the gradients.
        """
        owner, finite = self._owner, self._finite
        self._owner = self._finite = None
        owners = [BACKEND.owner(BACKEND.values(grad)) for grad, _ in gradients.present[:1]]
        return finite if owners == [owner] else None


def all_finite(loss: Any) -> Any:
    """Returns whether a loss, or each of an array of losses, is finite, as a flag of the backend."""
    return keras.ops.all(keras.ops.isfinite(loss))
