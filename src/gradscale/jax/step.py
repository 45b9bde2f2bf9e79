"""The rooms of a step, one after the other, for gradients that are there: measure, agree, decide, unscale."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gradscale.engine.decide import check_clip, decide
from gradscale.jax.agree import AxisNames, mapped_axes
from gradscale.jax.measure import Measured, agreed, measure
from gradscale.jax.result import StepResult
from gradscale.kernels.jax import wide_type
from gradscale.policies.contract import Policy, Seen


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller wants of a step.

    Attributes:
        clip_norm: bound on the norm of all gradients together, in true units.
        norm: measure the norm even if nothing is clipped.
        axis_names: mapped axes to agree over; None stands for all that JAX knows.
    """

    clip_norm: float | None = None
    norm: bool = False
    axis_names: AxisNames = None

    def __post_init__(self) -> None:
        check_clip("clip_norm", self.clip_norm)

    @property
    def wants_norm(self) -> bool:
        """Whether the norm is to be measured."""
        return self.norm or self.clip_norm is not None


class Attempt(NamedTuple):
    """Gradients, and what was seen of them.

    Attributes:
        state: the state whose scale made them.
        gradients: the gradients, scaled.
        measured: what was measured and agreed on.
        loss_finite: whether the loss was finite, on every device.
        retries: how many attempts came before this one.
    """

    state: Any
    gradients: tuple[Array, ...]
    measured: Measured
    loss_finite: Array
    retries: Array


def attempt(
    policy: Policy, state: Any, gradients: Sequence[Array], loss_finite: Array, asked: Asked, retries: Array | int = 0
) -> Attempt:
    """Returns what there is to know about `gradients`, made at the scale of `state`: measured, and agreed on."""
    found = measure(gradients, policy, norm=asked.wants_norm)
    measured, loss_finite = agreed(found, loss_finite, mapped_axes(asked.axis_names))
    return Attempt(state, tuple(gradients), measured, loss_finite, jnp.asarray(retries, jnp.int32))


def finish(
    policy: Policy, before: Any, last: Attempt, names: tuple[str, ...], asked: Asked
) -> tuple[list[Array], Any, StepResult]:
    """Returns the gradients to apply, the next state, and the result of the step.

    If the last attempt overflowed too, the rule goes on from where it was before the first, and so backs off once:
    gradients that are NaN at any scale would drain the scale otherwise.

    Args:
        policy: the rule.
        before: the state before the first attempt.
        last: the last attempt.
        names: what the gradients are called.
        asked: what the caller wants.
    """
    seen = last.measured.seen(last.state.scale, last.loss_finite)
    state = before if last.state is before else _either(seen.finite, last.state, before)
    outcome = decide(policy, state, seen, jnp, asked.clip_norm)
    if not last.gradients:
        return [], before, _result(policy, before, last, seen, jnp.zeros_like(outcome.applied), names, asked)
    gate = outcome.applied if policy.needs else None
    gradients = [_unscaled(gradient, outcome.factor, gate) for gradient in last.gradients]
    return gradients, outcome.state, _result(policy, outcome.state, last, seen, outcome.applied, names, asked)


def _unscaled(gradient: Array, factor: Array, gate: Array | None) -> Array:
    """Returns the gradient times `factor`, in float32 or wider; zeros where the gate is shut, whatever it holds."""
    wide = wide_type(gradient)
    product = (gradient.astype(wide) * factor).astype(wide)
    return product if gate is None else jnp.where(gate, product, jnp.zeros_like(product))


def _either(condition: Array, left: Any, right: Any) -> Any:
    return jax.tree.map(lambda one, other: jnp.where(condition, one, other), left, right)


def _result(
    policy: Policy, after: Any, last: Attempt, seen: Seen, applied: Array, names: tuple[str, ...], asked: Asked
) -> StepResult:
    measured = last.measured
    return StepResult(
        applied=applied,
        scale=jnp.copy(last.state.scale),  # the scaler's own arrays may be donated while the result is kept
        next_scale=jnp.copy(after.scale),
        loss_finite=last.loss_finite,
        retries=last.retries,
        sizes=measured.sizes if measured.sizes.size else None,
        grad_norm=seen.norm if asked.wants_norm and last.gradients else None,
        amax=seen.amax if "amax" in policy.needs and last.gradients else None,
        names=names,
        attempted=bool(last.gradients),
        gated=bool(policy.needs),
        clip_norm=asked.clip_norm,
    )
