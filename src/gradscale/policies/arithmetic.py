"""The few operations the rules are made of, in words every framework shares.

Scales come from multiplication and comparison alone. `exp2` and `log2` are not exact everywhere (JAX on CPU gets
`exp2(k)` wrong for most integers k), and a rule that used them would give different scales on different frameworks.
"""

from typing import Protocol

from gradscale.record import Array


class Namespace(Protocol):
    """The functions a rule may call: found in `numpy`, `torch`, `jax.numpy` and `keras.ops` alike."""

    def where(self, condition: Array, x: Array, y: Array, /) -> Array: ...
    def logical_and(self, x: Array, y: Array, /) -> Array: ...
    def logical_or(self, x: Array, y: Array, /) -> Array: ...
    def logical_not(self, x: Array, /) -> Array: ...
    def isfinite(self, x: Array, /) -> Array: ...
    def floor(self, x: Array, /) -> Array: ...


def larger(x: Array, y: Array, xp: Namespace) -> Array:
    """Returns the larger of two values; `y` where one is NaN. (`torch.maximum` refuses Python numbers.)"""
    return xp.where(x > y, x, y)


def smaller(x: Array, y: Array, xp: Namespace) -> Array:
    """Returns the smaller of two values; `y` where one is NaN."""
    return xp.where(x < y, x, y)


def bounded(x: Array, low: Array, high: Array, xp: Namespace) -> Array:
    """Returns `x` kept between `low` and `high`."""
    return smaller(larger(x, low, xp), high, xp)


def pow2_floor(x: Array, xp: Namespace) -> Array:
    """Returns the largest power of two that is not above `x`, exactly, for 2**-126 <= x < 2**127; 2**-126 below that.

    A binary search over the exponent: eight comparisons and multiplications by powers of two, none of which rounds.

    >>> import numpy as np
    >>> float(pow2_floor(np.float32(65535), np)), float(pow2_floor(np.float32(0.3), np))
    (32768.0, 0.25)
    """
    power = x * 0 + 2.0**-126
    for exponent in (126, 63, 32, 16, 8, 4, 2, 1):  # every sum from 0 to 252; from 128 on, 2**128 would turn up
        higher = power * 2.0**exponent
        power = xp.where(x >= higher, higher, power)
    return power
