"""How arrays are stored: in float32 or in float16. Sums are in float32 and rounded once, as on tensor cores."""

from collections.abc import Callable

import numpy as np

from gradscale.demo.run import Array

Store = Callable[[Array], Array]
"""Takes a float32 array and returns it as it is stored."""

SMALLEST_NORMAL = np.float32(2.0**-14)
ROUNDER = np.float32(0.75)
"""Float32 numbers near 0.75 are 2**-24 apart, as float16's subnormals are, so adding it rounds as float16 would."""


with np.errstate(invalid="ignore"):  # some of the NaNs are signaling
    WIDENED = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""Every float16 number in float32. A lookup is twenty times faster than numpy's conversion of a subnormal."""


def single(values: Array) -> Array:
    """Returns the array as it is: stored in float32."""
    return values


def half(values: Array) -> Array:
    """Returns the array in float16: rounded to nearest, infinite above 65504, zero below 2**-25.

    Subnormals are rounded before the conversion: numpy takes fifty times as long for those it has to round.
    """
    subnormal = np.abs(values) < SMALLEST_NORMAL
    rounded = np.where(subnormal, (values + ROUNDER) - ROUNDER, values)
    with np.errstate(over="ignore"):
        return rounded.astype(np.float16)


def wide(stored: Array) -> Array:
    """Returns a stored array in float32, for computing with."""
    return WIDENED.take(stored.view(np.uint16)) if stored.dtype == np.float16 else stored
