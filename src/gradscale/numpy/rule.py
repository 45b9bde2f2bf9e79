"""Room three, decide: the core's decision on numpy scalars, with any version of numpy."""

from typing import TypeVar

import numpy as np

from gradscale.decide import decide
from gradscale.policy import Policy
from gradscale.record import numbers, with_values
from gradscale.state import Outcome, ScaleState, Seen

R = TypeVar("R")


@np.errstate(divide="ignore", over="ignore", invalid="ignore")  # some systems' rules bring the scale down to 0
def decide_on_host(policy: Policy, state: ScaleState, seen: Seen, clip_norm: float | None) -> Outcome:
    """Returns the next state, the gate and the factor, as numpy scalars.

    The rule runs on vectors of one element: of a float32 scalar times a Python number, numpy 1 makes float64.
    """
    outcome = decide(policy, _vector(state), _vector(seen), np, clip_norm)
    return Outcome(_scalar(outcome.state), outcome.applied[0], outcome.factor[0])


def _vector(record: R) -> R:
    return with_values(record, {name: np.atleast_1d(value) for name, value in numbers(record).items()})


def _scalar(record: R) -> R:
    return with_values(record, {name: np.reshape(value, ())[()] for name, value in numbers(record).items()})
