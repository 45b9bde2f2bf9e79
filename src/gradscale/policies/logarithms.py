"""Logarithm, power and root for statistics, with the same bits on every framework.

`log2`, `exp2` and powers differ in their last bits from one framework to the next, and in numpy even between a number
and a vector. These are made of comparisons, exact multiplications, sums and quotients. None of them sums a product, so
a compiler has nothing to fuse. What they give up is accuracy, which statistics of gradients do not need.
"""

from gradscale.policies.arithmetic import Namespace
from gradscale.record import Array

LOWEST_EXPONENT = -126
EXPONENTS = (126, 63, 32, 16, 8, 4, 2, 1)
"""Their sums are all whole numbers from 0 to 252, and with -126 the exponents of normal float32 numbers."""


def log2_linear(x: Array, xp: Namespace) -> Array:
    """Returns log2 of `x`, exact at powers of two and linear between them: at most 0.09 too low.

    >>> import numpy as np
    >>> float(log2_linear(np.float32(0.25), np)), float(log2_linear(np.float32(6), np))
    (-2.0, 2.5)

    Args:
        x: from 2**-126 up to, but not including, 2**127.
        xp: the framework's array module.
    """
    power = x * 0 + 2.0**LOWEST_EXPONENT
    exponent = x * 0 + LOWEST_EXPONENT
    for step in EXPONENTS:
        fits = x >= power * 2.0**step
        power = xp.where(fits, power * 2.0**step, power)
        exponent = xp.where(fits, exponent + step, exponent)
    return exponent + (x / power - 1.0)


def exp2_linear(y: Array, xp: Namespace) -> Array:
    """Returns the inverse of `log2_linear`.

    >>> import numpy as np
    >>> float(exp2_linear(np.float32(-2), np)), float(exp2_linear(np.float32(2.5), np))
    (0.25, 6.0)

    Args:
        y: from -126 to 126.
        xp: the framework's array module.
    """
    whole = xp.floor(y)
    left = whole - LOWEST_EXPONENT
    power = y * 0 + 2.0**LOWEST_EXPONENT
    for step in EXPONENTS:
        fits = left >= step
        power = xp.where(fits, power * 2.0**step, power)
        left = xp.where(fits, left - step, left)
    return power * (1.0 + (y - whole))


def root(x: Array) -> Array:
    """Returns the square root of a number that is not negative: to 1% from 0.0005 to 2,000, too large beyond.

    Six steps of Heron's method. Each comes from above, so the root is never too small.

    >>> import numpy as np
    >>> round(float(root(np.float32(2))), 6), float(root(np.float32(1)))
    (1.414214, 1.0)
    """
    guess = (x + 1.0) * 0.5
    for _ in range(6):
        guess = (guess + x / guess) * 0.5
    return guess
