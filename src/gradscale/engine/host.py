"""The rules in host memory: on numpy scalars, as fast as Python allows, and with any version of numpy.

numpy's own functions make an array of every scalar they are given, which takes longer than the arithmetic. These do
not, and a step of a rule takes a tenth of the time, with the same bits. They need numpy 2: before, a float32 scalar
times a Python number was a float64.
"""

import math
from typing import Any, TypeVar

import numpy as np

from gradscale.engine.decide import Outcome, decide
from gradscale.policies.contract import Policy, ScaleState, Seen
from gradscale.record import Array, numbers, with_values

R = TypeVar("R")

EXACT = bool((np.float32(1) * 1.0).dtype == np.float32)
"""Whether rules may be run on scalars: whether a float32 stays one."""


class Scalars:
    """What a rule may call, for numpy scalars and Python numbers. What is not here is numpy's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def where(condition: Array, x: Array, y: Array, /) -> Array:
        """Returns `x` or `y`. A Python number takes the type of the other, as it would in an array."""
        # Rules write `where(grows, 0, clean_steps)`: the 0 must become an int32 scalar, or the state would change type.
        chosen, other = (x, y) if condition else (y, x)
        is_plain = hasattr(other, "dtype") and not hasattr(chosen, "dtype")
        return other.dtype.type(chosen) if is_plain else chosen

    @staticmethod
    def logical_and(x: Array, y: Array, /) -> Array:
        """Returns whether both hold."""
        return np.bool_(x and y)

    @staticmethod
    def logical_or(x: Array, y: Array, /) -> Array:
        """Returns whether one of the two holds."""
        return np.bool_(x or y)

    @staticmethod
    def logical_not(x: Array, /) -> Array:
        """Returns whether `x` does not hold."""
        return np.bool_(not x)

    @staticmethod
    def isfinite(x: Array, /) -> Array:
        """Returns whether `x` is neither infinite nor NaN."""
        return np.bool_(math.isfinite(x))

    @staticmethod
    def asarray(x: Array, /, dtype: Any = None) -> Array:
        """Returns `x` as a scalar of `dtype`."""
        return np.asarray(x, dtype)[()]


SCALARS: Any = Scalars()


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
