"""Runs of a policy, one letter for each step, and a comparison of two states."""

from dataclasses import fields
from typing import Any

import numpy as np

from gradscale import ScaleState, Seen
from gradscale.engine.host import scalar, vector
from gradscale.policies.scalars import EXACT

CLEAN = Seen(finite=np.bool_(True))
OVERFLOW = Seen(finite=np.bool_(False))
BAD_LOSS = Seen(finite=np.bool_(False), loss_finite=np.bool_(False))
BAD_LOSS_ALONE = Seen(finite=np.bool_(True), loss_finite=np.bool_(False))
BY_LETTER = {"c": CLEAN, "o": OVERFLOW, "b": BAD_LOSS, "l": BAD_LOSS_ALONE}


def next_of(policy: Any, state: Any, seen: Any) -> Any:
    """Returns `policy.next` of numpy scalars or vectors, in the types of the state.

    In numpy 1 a float32 scalar times a Python number is float64, and so scalars are run as vectors of one element.
    """
    if EXACT or np.ndim(state.scale):
        return policy.next(state, seen, np)
    return scalar(policy.next(vector(state), vector(seen), np))


def after(policy: Any, story: str, state: ScaleState | None = None) -> ScaleState:
    """Returns the state after a story: c for a clean step, o for an overflow, b and l for a non-finite loss."""
    reached: ScaleState = policy.start() if state is None else state
    for step in story:
        reached = next_of(policy, reached, BY_LETTER[step])
    return reached


def same(one: ScaleState, other: ScaleState) -> bool:
    """Returns whether two states have the same values."""
    return all(np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(ScaleState))
