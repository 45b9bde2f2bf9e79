"""Measure: what a step reads of its gradients, and for whom."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras

from gradscale.formats import FP16
from gradscale.keras.backends import Observation, StepPlan, current

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


def measure(optimizer: Any, gradients: Gradients, loss_finite: Any, *, norm: bool, kinds: bool) -> Observation | None:
    """Returns what is found in the gradients; None where neither the policy nor the caller asks for anything.

    Does not synchronize with the device, except on torch.
    """
    plan = StepPlan.of(optimizer.policy, norm=norm)
    present = gradients.present
    if not present or not (plan.checks or plan.norm):
        return None
    grads, variables = zip(*present, strict=True)
    plan = replace(
        plan,
        amax=plan.amax or kinds,  # the result of a custom loop has it
        kinds=kinds,
        scale=optimizer.dynamic_scale.value,
        overwrites=_where([overwrites(variable) for variable in variables]),
        half=_where([_is_half(variable) for variable in variables]),
    )
    return BACKEND.measure(grads, loss_finite, plan)


def _where(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(position for position, flag in enumerate(flags) if flag)


def _is_half(variable: Any) -> bool:
    """Returns whether the inner optimizer sees the unscaled gradient in FP16, where it may overflow."""
    # Keras casts a gradient to the dtype of its variable. Divided by a scale below 1, a finite one may become inf.
    return keras.backend.standardize_dtype(variable.dtype) == FP16.dtype_name and not overwrites(variable)
