"""The namespace of rules in host memory: on numpy scalars, as fast as Python allows, and with any version of numpy.

numpy's own functions make an array of every scalar they are given, which takes longer than the arithmetic. These do
not, and a step of a rule takes a tenth of the time, with the same bits. They need numpy 2: before, a float32 scalar
times a Python number was a float64.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from gradscale.policies.compiled import CALLED, PYTHON, compiled
from gradscale.policies.contract import Policy, Seen, bounded_next
from gradscale.record import Array

EXACT = bool((np.float32(1) * 1.0).dtype == np.float32)
"""Whether rules may be run on scalars: whether a float32 stays one."""


PLAIN = frozenset((float, int, bool))
"""Types of Python numbers."""


@lru_cache(128)  # a process has a few policies; a test suite has thousands
def compiled_rule(policy: Policy) -> Callable[[Any, Any], Any]:
    """Returns `contract.advanced` of a policy as one function of a state and of what was seen."""
    return compiled(partial(bounded_next, policy), state=policy.start(), seen=Seen())


class Scalars:
    """What a rule may call, for numpy scalars and Python numbers. What is not here is numpy's own."""

    @staticmethod
    def rule(policy: Policy, /) -> Callable[[Any, Any], Any]:
        """Returns `contract.advanced` of a policy as a function of a state and of what was seen."""
        # By its own class, and not one that it is derived from: what a user has added may not be traced. Such a policy
        # is not kept either: it may refer to a model.
        if vars(type(policy)).get("is_compiled"):
            return compiled_rule(policy)
        return lambda state, seen: bounded_next(policy, state, seen, SCALARS)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def where(condition: Array, x: Array, y: Array, /) -> Array:
        """Returns `x` or `y`. A Python number takes the type of the other, as it would in an array."""
        # Rules write `where(grows, 0, clean_steps)`: the 0 must become an int32 scalar, or the state would change type.
        chosen, other = (x, y) if condition else (y, x)
        return other.dtype.type(chosen) if type(chosen) in PLAIN and type(other) not in PLAIN else chosen

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

    pow2_floor = staticmethod(eval(f"lambda number: {PYTHON['pow2_floor'].format('number')}", dict(CALLED)))

    @staticmethod
    def asarray(x: Array, /, dtype: Any = None) -> Array:
        """Returns `x` as a scalar of `dtype`."""
        return np.asarray(x, dtype)[()]


SCALARS: Any = Scalars()
