"""What a kernel of a rule may call, beside Triton's own functions. Importing it needs Triton."""

import triton
import triton.language as tl

from gradscale.engine.packed import BLOCK

LEVELS = tl.constexpr(BLOCK.bit_length() - 1)
SIGNLESS = tl.constexpr(0x7FFFFFFF)
EXPONENT = tl.constexpr(0x7F800000)
LOWEST_POWER, HIGHEST_POWER = tl.constexpr(2.0**-126), tl.constexpr(2.0**126)
WHOLE_FROM = tl.constexpr(2.0**23)


@triton.jit
def isfinite(x):
    """Returns whether `x` is neither infinite nor NaN."""
    return (x.to(tl.int32, bitcast=True) & SIGNLESS) < EXPONENT


@triton.jit
def floor(x):
    """Returns the largest whole number that is not above `x`: `tl.floor` flushes subnormal numbers to 0."""
    near = tl.abs(x) < WHOLE_FROM  # all others are whole, or not finite
    whole = tl.where(near, x, 0.0).to(tl.int32).to(tl.float32)
    below = tl.where(whole > x, whole - 1.0, whole)
    return tl.where(near & (below != x), below, x)  # x itself where it is whole, also -0.0


@triton.jit
def pow2_floor(x):
    """Returns the largest power of two from 2**-126 to 2**126 that is not above `x`; NaN if `x` is not finite."""
    within = tl.where(x > LOWEST_POWER, x, LOWEST_POWER)
    within = tl.where(within < HIGHEST_POWER, within, HIGHEST_POWER)
    power = (within.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return tl.where(isfinite(x), power, float("nan"))


@triton.jit
def largest(numbers, row, length, first, end, BLOCK: tl.constexpr):
    """Returns the largest magnitude of each row's numbers from `first` to `end`; NaN if one is, else inf if one is."""
    # As integers: without their signs, the bits of floats are in their order, and NaN is above inf.
    column = tl.arange(0, BLOCK)[None, :]
    found = tl.zeros((row.shape[0], BLOCK), tl.int32)
    for start in range(first, end, BLOCK):
        at = start + column
        bits = tl.load(numbers + row[:, None] * length + at, mask=at < end, other=0.0).to(tl.int32, bitcast=True)
        found = tl.maximum(found, bits & SIGNLESS)
    return tl.max(found, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def norm_of(numbers, row, length, end, BLOCK: tl.constexpr):
    """Returns the norm of each row's first `end` numbers, added in the order of `packed.norm_of`."""
    column = tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros((row.shape[0], BLOCK), tl.float32)
    for start in range(0, end, BLOCK):
        at = start + column
        x = tl.load(numbers + row[:, None] * length + at, mask=at < end, other=0.0)
        sums += x * x
    # Two numbers at a time: the order in which a reduction adds more is up to the compiler.
    for _ in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, (row.shape[0], 2, sums.shape[1] // 2)), axis=1)
    return tl.sqrt_rn(tl.reshape(sums, (row.shape[0],)))
