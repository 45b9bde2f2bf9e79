"""The decision in host memory, with any version of numpy."""

from typing import TypeVar

import numpy as np

from gradscale.engine.decide import Outcome, decide
from gradscale.policies.contract import Policy, ScaleState, Seen
from gradscale.record import numbers, with_values

R = TypeVar("R")


@np.errstate(divide="ignore", over="ignore", invalid="ignore")  # sizes that are not finite
def decide_on_host(
    policy: Policy, state: ScaleState, seen: Seen, clip_norm: float | None, divisor: float | None = None
) -> Outcome:
    """Returns what `decide` does, as numpy scalars."""
    # Vectors of one element: in numpy 1, a float32 scalar times a Python number is float64, but an array stays float32.
    divisors = None if divisor is None else np.atleast_1d(np.float32(divisor))
    outcome = decide(policy, vector(state), vector(seen), np, clip_norm, divisors)
    return Outcome(scalar(outcome.state), outcome.applied[0], outcome.factor[0])


def vector(record: R) -> R:
    """Returns the record with a vector of one element for each scalar."""
    return with_values(record, {name: np.atleast_1d(value) for name, value in numbers(record).items()})


def scalar(record: R) -> R:
    """Returns the record with a scalar for each vector of one element."""
    return with_values(record, {name: np.reshape(value, ())[()] for name, value in numbers(record).items()})
