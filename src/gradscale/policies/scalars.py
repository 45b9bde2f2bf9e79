"""The namespace of rules in host memory: on numpy scalars, as fast as Python allows, and with any version of numpy.

numpy's own functions make an array of every scalar they are given, which takes longer than the arithmetic. These do
not, and a step of a rule takes a tenth of the time, with the same bits. They need numpy 2: before, a float32 scalar
times a Python number was a float64.
"""

import math
from typing import Any, ClassVar

import numpy as np

from gradscale.record import Array

EXACT = bool((np.float32(1) * 1.0).dtype == np.float32)
"""Whether rules may be run on scalars: whether a float32 stays one."""


LOWEST_POWER, HIGHEST_POWER = 2.0**-126, 2.0**126
"""The ends of the search in `arithmetic.pow2_floor`."""

PLAIN = frozenset((float, int, bool))
"""Types of Python numbers."""


class Scalars:
    """What a rule may call, for numpy scalars and Python numbers. What is not here is numpy's own."""

    reads_scalars: ClassVar[bool] = True

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

    @staticmethod
    def pow2_floor(x: Array, /) -> Array:
        """Returns what `arithmetic.pow2_floor` finds by a search."""
        if not math.isfinite(x):
            return x * 0
        _, exponent = math.frexp(min(max(x, LOWEST_POWER), HIGHEST_POWER))
        return type(x)(math.ldexp(0.5, exponent))

    @staticmethod
    def asarray(x: Array, /, dtype: Any = None) -> Array:
        """Returns `x` as a scalar of `dtype`."""
        return np.asarray(x, dtype)[()]


SCALARS: Any = Scalars()
