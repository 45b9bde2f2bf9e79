"""The namespace of rules in host memory: on numpy scalars, as fast as Python allows, and with any version of numpy.

numpy's own functions make an array of every scalar they are given, which takes longer than the arithmetic. These do
not, and a step of a rule takes a tenth of the time, with the same bits. They need numpy 2: before, a float32 scalar
times a Python number was a float64.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gradscale.policies.compiled import CALLED, PYTHON, compiled
from gradscale.policies.contract import Policy, Seen, bounded_next
from gradscale.record import Array

EXACT = bool((np.float32(1) * 1.0).dtype == np.float32)
"""Whether rules may be run on scalars: whether a float32 stays one."""


PLAIN = frozenset((float, int, bool))
"""Types of Python numbers."""


MOST_COMPILED = 128
"""How many policies are kept compiled. A process has a few; a test suite has thousands."""


class Scalars:
    """What a rule may call, for numpy scalars and Python numbers. What is not here is numpy's own."""

    def __init__(self) -> None:
        self._compiled: dict[Policy, Callable[[Any, Any], Any]] = {}
        self._last: tuple[Policy, Callable[[Any, Any], Any]] | None = None

    def rule(self, policy: Policy, /) -> Callable[[Any, Any], Any]:
        """Returns `contract.advanced` of a policy as a function of a state and of what was seen."""
        # Mostly the same as at the last step: the hash of a policy takes a tenth as long as its rule.
        last = self._last
        if last is not None and last[0] is policy:
            return last[1]
        # By its own class, and not one that it is derived from: what a user has added may not be traced. Such a policy
        # is not kept either: it may refer to a model.
        if not vars(type(policy)).get("is_compiled"):
            return lambda state, seen: bounded_next(policy, state, seen, SCALARS)
        function = self._compiled.get(policy)
        if function is None:
            if len(self._compiled) >= MOST_COMPILED:
                self._compiled.clear()
            function = compiled(partial(bounded_next, policy), state=policy.start(), seen=Seen())
            self._compiled[policy] = function
        self._last = policy, function
        return function

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
