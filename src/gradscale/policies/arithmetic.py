"""The operations that rules consist of, bit-exact on every framework and CPU.

`log2`, `exp2`, powers and square roots differ in their last bits from one framework to the next (JAX on CPU gets
`exp2(k)` wrong for most integers k; torch's float32 `sqrt` is MKL's, which on some CPUs rounds one number in six
wrongly), and in numpy even between a number and a vector. So scales come from multiplication and comparison alone, and
statistics from the functions below. None of these sums a product, so a compiler has nothing to fuse into a
multiply-add.
"""

from typing import Protocol

from gradscale.record import Array

_LOWEST_EXPONENT = -126
_EXPONENTS = (126, 63, 32, 16, 8, 4, 2, 1)
"""Steps of a binary search. Their sums are all whole numbers from 0 to 252, which with -126 are the exponents of normal
float32 numbers. No step of 128: 2**128 would overflow."""


class Namespace(Protocol):
    """The functions a rule may call. `numpy`, `torch`, `jax.numpy` and `keras.ops` all have them."""

    def where(self, condition: Array, x: Array, y: Array, /) -> Array: ...
    def logical_and(self, x: Array, y: Array, /) -> Array: ...
    def logical_or(self, x: Array, y: Array, /) -> Array: ...
    def logical_not(self, x: Array, /) -> Array: ...
    def isfinite(self, x: Array, /) -> Array: ...
    def floor(self, x: Array, /) -> Array: ...


def larger(x: Array, y: Array, xp: Namespace) -> Array:
    """Returns the larger of two values; `y` where one is NaN. (`torch.maximum` takes no Python numbers.)"""
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
    # A namespace of scalars reads the exponent off the number, which is faster.
    if (read := getattr(xp, "pow2_floor", None)) is not None:
        return read(x)
    # Not 2**floor(log2(x)): floor(log2) is off by one for 23 of the 254 powers of two on JAX.
    power = x * 0 + 2.0**_LOWEST_EXPONENT  # `x * 0`, not a constant: the device, type and shape of `x`
    for exponent in _EXPONENTS:
        higher = power * 2.0**exponent
        power = xp.where(x >= higher, higher, power)
    return power


def two_to(bits: Array, xp: Namespace) -> Array:
    """Returns 2**bits, exactly, for whole `bits` from 0 to 15.

    A framework's power may be off in its last digits. Here it is a small integer, and rounding corrects it.

    >>> import numpy as np
    >>> two_to(2.0, np), two_to(np.array([0, 3], np.float32), np).tolist()
    (4.0, [1.0, 8.0])
    """
    if isinstance(bits, float):
        return 2.0**bits
    # Up to 2**15, an error in the last place is far below 0.5.
    return xp.floor(2.0**bits + 0.5)


def log2_linear(x: Array, xp: Namespace) -> Array:
    """Returns log2 of `x`, exact at powers of two and linear between them: at most 0.09 too low.

    >>> import numpy as np
    >>> float(log2_linear(np.float32(0.25), np)), float(log2_linear(np.float32(6), np))
    (-2.0, 2.5)

    Takes `x` from 2**-126 up to, but not including, 2**127.
    """
    power = x * 0 + 2.0**_LOWEST_EXPONENT
    exponent = x * 0 + _LOWEST_EXPONENT
    for step in _EXPONENTS:
        fits = x >= power * 2.0**step
        power = xp.where(fits, power * 2.0**step, power)
        exponent = xp.where(fits, exponent + step, exponent)
    # Dividing by a power of two is exact, and so is subtracting 1 from a number between 1 and 2 (Sterbenz).
    return exponent + (x / power - 1.0)


def exp2_linear(y: Array, xp: Namespace) -> Array:
    """Returns the inverse of `log2_linear`.

    >>> import numpy as np
    >>> float(exp2_linear(np.float32(-2), np)), float(exp2_linear(np.float32(2.5), np))
    (0.25, 6.0)

    Takes `y` from -126 to 126.
    """
    whole = xp.floor(y)
    remaining = whole - _LOWEST_EXPONENT
    power = y * 0 + 2.0**_LOWEST_EXPONENT
    for step in _EXPONENTS:
        fits = remaining >= step
        power = xp.where(fits, power * 2.0**step, power)
        remaining = xp.where(fits, remaining - step, remaining)
    return power * (1.0 + (y - whole))


def root(x: Array) -> Array:
    """Returns the square root of a number that is not negative: within 1% from 0.0005 to 2,000, too large beyond.

    Six steps of Heron's method. Each comes from above, so the root is never too small.

    >>> import numpy as np
    >>> round(float(root(np.float32(2))), 6), float(root(np.float32(1)))
    (1.414214, 1.0)
    """
    # (x + 1) / 2 is never below the root, the arithmetic mean of x and 1 being at least the geometric one. A fixed
    # number of steps, as a test for convergence would synchronize with the device.
    guess = (x + 1.0) * 0.5
    for _ in range(6):
        guess = (guess + x / guess) * 0.5
    return guess
