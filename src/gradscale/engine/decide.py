"""The decision of a step: made once, from agreed facts, for everyone who shares the scale."""

from dataclasses import dataclass

import numpy as np

from gradscale.policies.arithmetic import Namespace, smaller
from gradscale.policies.checks import check_number
from gradscale.policies.contract import Policy, ScaleState, Seen, advanced
from gradscale.record import Array

CLIP_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm; kept, so that clipped updates agree with it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decision of a step, made once for every device, rank and optimizer that shares the scale.

    Attributes:
        state: the scale's state for the next step.
        applied: the gate. True applies the update, False leaves weights and optimizer state as they are.
        factor: what every gradient is multiplied by before the update: unscaling and clipping in one number. Zero
            where the step is skipped.
    """

    state: ScaleState
    applied: Array
    factor: Array


def decide(
    policy: Policy,
    state: ScaleState,
    seen: Seen,
    xp: Namespace,
    clip_norm: float | None = None,
    divisor: Array | None = None,
) -> Outcome:
    """Returns the next state, the gate, and the one factor that unscales and clips.

    Does not synchronize with the device, and reads no gradient.

    Args:
        policy: the rule.
        state: the state before the step.
        seen: what was measured of the gradients, unscaled.
        xp: the framework's array module.
        clip_norm: bound on the norm of all gradients together; `seen.norm` must then have been measured.
        divisor: what the gradients must be divided by: the scale that made them, or 1 where they are unscaled already.
            By default `state.scale`, which is not the scale of the next step.
    """
    applied = xp.logical_and(seen.finite, seen.loss_finite)
    # Always True, in the framework's own type and shape: `NoScaling` applies every step, whatever was measured.
    if not policy.needs:
        applied = xp.logical_or(applied, xp.logical_not(applied))
    # A numpy float64 would widen the factor; a Python number takes the type of the norm.
    clip = None if clip_norm is None else float(clip_norm)
    factor = unscale_and_clip(state.scale if divisor is None else divisor, seen.norm, clip, xp)
    return Outcome(advanced(policy, state, seen, xp), applied, xp.where(applied, factor, 0.0))


def unscale_and_clip(divisor: Array, norm: Array, clip_norm: Array | None, xp: Namespace) -> Array:
    """Returns the one factor that divides gradients by `divisor` and reduces their unscaled `norm` to `clip_norm`."""
    # One factor for both, so that gradients are read and written once.
    unscale = 1.0 / divisor
    return unscale if clip_norm is None else unscale * _clip_coefficient(norm, clip_norm, xp)


def check_clip(name: str, bound: float | None) -> None:
    """Raises if the bound of a clip is given and is not a positive number."""
    if bound is None:
        return
    check_number(name, bound)
    if not bound > 0:
        raise ValueError(f"`{name}` must be greater than 0. Received: {name}={bound!r}. For no clipping pass None.")


def check_retries(retries: int) -> None:
    """Raises unless `retries` is an integer that is not negative."""
    if isinstance(retries, bool) or not isinstance(retries, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`retries` must be an integer. Received: retries={retries!r} ({type(retries).__name__}).")
    if retries < 0:
        raise ValueError(f"`retries` must not be negative. Received: retries={retries!r}.")


def _clip_coefficient(norm: Array, clip_norm: Array, xp: Namespace) -> Array:
    """Returns the factor that reduces `norm` to `clip_norm`, or 1 where it is not larger."""
    return smaller(clip_norm / (norm + CLIP_EPSILON), 1.0, xp)
