"""Powers of two of numpy scalars, read off their exponents: faster than `arithmetic` finds them, with the same bits."""

import math

from gradscale.record import Array

LOWEST_POWER, HIGHEST_POWER = 2.0**-126, 2.0**126
"""The ends of the search in `arithmetic.pow2_floor`."""


def pow2_floor(x: Array) -> Array:
    """Returns what `arithmetic.pow2_floor` finds by a search."""
    if not math.isfinite(x):
        return x * 0
    _, exponent = math.frexp(min(max(x, LOWEST_POWER), HIGHEST_POWER))
    return type(x)(math.ldexp(0.5, exponent))
