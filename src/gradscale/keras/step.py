"""The rooms of a step, one after the other, for gradients that are there: measure, agree, decide, apply."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from gradscale.engine.decide import Outcome, decide
from gradscale.formats import FP16
from gradscale.keras.backends import Asked, Measured, Update, current
from gradscale.keras.result import StepResult
from gradscale.policies.contract import Policy, Seen
from gradscale.record import Array

BACKEND = current()

HALF = FP16.dtype_name


class Pairs(NamedTuple):
    """The gradients of a step beside their variables.

    Attributes:
        grads: scaled gradients; None for a variable without one.
        variables: the variables.
    """

    grads: list[Any]
    variables: list[Any]

    @property
    def present(self) -> list[tuple[Any, Any]]:
        """The pairs that have a gradient."""
        return [pair for pair in zip(*self, strict=True) if pair[0] is not None]


class Taken(NamedTuple):
    """A step that was taken.

    Attributes:
        scale: the scale that made the gradients.
        measured: what was found in them; None where nobody looked.
        seen: the same in true units.
        outcome: what was decided.
    """

    scale: Array
    measured: Measured | None
    seen: Seen
    outcome: Outcome


def take(optimizer: Any, pairs: Pairs, loss: Any, *, norm: bool, kinds: bool) -> Taken:
    """Runs the inner optimizer if the gradients are finite, and moves the scale.

    Nothing has changed if the inner optimizer raises. Waits for the device on torch only.

    Args:
        optimizer: the optimizer, built.
        pairs: scaled gradients and their variables.
        loss: the unscaled loss, or None where it is not known.
        norm: whether to measure the norm.
        kinds: whether to tell which gradients hold a NaN.
    """
    policy, inner = optimizer.policy, optimizer.inner_optimizer

    def finish(measured: Measured | None, update: Update) -> Taken:
        state = optimizer.read_state(BACKEND.leaves)
        seen = Seen() if measured is None else measured.seen(state.scale, BACKEND.XP)
        outcome = decide(policy, state, seen, BACKEND.XP)
        if policy.needs:
            changing = [*optimizer.trainable_variables, *inner.variables]
            BACKEND.gate(outcome.applied, lambda: update(state.scale), changing, inner.assign)
        else:
            update(state.scale)
        optimizer.write_state(outcome.state, BACKEND.vector)
        return Taken(state.scale, measured, seen, outcome)

    def update(grads: Sequence[Any], variables: Sequence[Any], scale: Array) -> None:
        inner.apply(unscaled(grads, variables, scale), variables)

    measured = _measure(optimizer, pairs, loss, norm=norm, kinds=kinds)
    return BACKEND.together(finish, measured, update, pairs.grads, pairs.variables)


def unscaled(grads: Sequence[Any], variables: Sequence[Any], scale: Array) -> list[Any]:
    """Returns the gradients divided by the scale, in float32 or wider.

    A variable that says so is overwritten with its gradient, which the scale of the loss has not touched.
    """
    scaled = [grad is not None and not overwrites(variable) for grad, variable in zip(grads, variables, strict=True)]
    true = iter(BACKEND.divided([grad for grad, is_scaled in zip(grads, scaled, strict=True) if is_scaled], scale))
    return [next(true) if is_scaled else grad for grad, is_scaled in zip(grads, scaled, strict=True)]


def overwrites(variable: Any) -> bool:
    """Returns whether the gradient of a variable is its next value, as with the scales of FP8 layers."""
    return getattr(variable, "overwrite_with_gradient", False)


def result_of(taken: Taken, pairs: Pairs, *, norm: bool) -> StepResult:
    """Returns what the caller of a custom loop is told about a step."""
    tensor = keras.ops.convert_to_tensor
    measured, seen = taken.measured, taken.seen
    names = tuple(_name(variable) for _, variable in pairs.present)
    return StepResult(
        applied=tensor(taken.outcome.applied),
        scale=tensor(taken.scale),
        next_scale=tensor(taken.outcome.state.scale),
        loss_finite=tensor(seen.loss_finite),
        amax=None if measured is None else tensor(seen.amax),
        grad_norm=tensor(seen.norm) if norm else None,
        sizes=None if measured is None else measured.sizes[: len(names)],
        names=names,
        attempted=True,
    )


def nothing_to_do(scale: Array) -> StepResult:
    """Returns the result of a step without gradients."""
    tensor = keras.ops.convert_to_tensor
    no, yes = tensor(False), tensor(True)
    return StepResult(no, tensor(scale), tensor(scale), yes, None, None, None, (), attempted=False)


def _measure(optimizer: Any, pairs: Pairs, loss: Any, *, norm: bool, kinds: bool) -> Measured | None:
    """Returns what was found in the gradients; None where neither the policy nor the caller wants to know."""
    policy: Policy = optimizer.policy
    present = pairs.present
    if not present or not (policy.needs or norm):
        return None
    edge = policy.edge_magnitude if "upper_share" in policy.needs else None  # pyright: ignore[reportAttributeAccessIssue]
    grads, variables = zip(*present, strict=True)
    wants_amax = kinds or "amax" in policy.needs
    asked = Asked(amax=wants_amax, norm=norm, edge=edge, kinds=kinds, scale=optimizer.dynamic_scale.value)
    narrow = _narrowed(grads, variables, asked.scale)
    own = [*map(overwrites, variables), *(True for _ in narrow)]
    return BACKEND.measure([*grads, *narrow], own, loss, asked)


def _narrowed(grads: Sequence[Any], variables: Sequence[Any], scale: Array) -> list[Any]:
    """Returns the gradients of weights stored in FP16 as the inner optimizer sees them: divided, and in FP16 again.

    A scale below 1 makes some of them larger than FP16 can hold. They are looked at beside the scaled ones.
    """
    stored = [keras.backend.standardize_dtype(variable.dtype) for variable in variables]
    true = unscaled(grads, variables, scale) if HALF in stored else ()
    return [keras.ops.cast(grad, HALF) for grad, dtype in zip(true, stored, strict=False) if dtype == HALF]


def _name(variable: Any) -> str:
    return getattr(variable, "path", None) or variable.name
