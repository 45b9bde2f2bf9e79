"""The kernels of `packet.py`. Importing it needs Triton."""

import triton
import triton.language as tl

from gradscale.engine.measurement import LARGEST_NORM
from gradscale.kernels.triton.functions import isfinite, largest
from gradscale.kernels.triton.packet import At

FINITE_BELOW = tl.constexpr(LARGEST_NORM)
GRADIENTS = tl.constexpr(int(At.GRADIENTS))
BAD = tl.constexpr(int(At.BAD))
BAD_LOSS = tl.constexpr(int(At.BAD_LOSS))
SPREAD = tl.constexpr(int(At.SPREAD))
SAME = tl.constexpr(int(At.SAME))
SAME_SQUARED = tl.constexpr(int(At.SAME_SQUARED))
HOLDERS = tl.constexpr(int(At.HOLDERS))
ABOVE = tl.constexpr(int(At.ABOVE))
ELEMENTS = tl.constexpr(int(At.ELEMENTS))
SCALE = tl.constexpr(int(At.SCALE))
SCALE_SQUARED = tl.constexpr(int(At.SCALE_SQUARED))
SENDS_AMAX = tl.constexpr(int(At.SENDS_AMAX))
ASKS_NORM = tl.constexpr(int(At.ASKS_NORM))
BOUNDS = tl.constexpr(int(At.BOUNDS))
BOUNDS_SQUARED = tl.constexpr(int(At.BOUNDS_SQUARED))
FOLLOWS = tl.constexpr(int(At.FOLLOWS))


@triton.jit
def greatest(numbers, first, end, BLOCK: tl.constexpr):
    """Returns the largest magnitude of the numbers from `first` to `end`; NaN if one is, else inf if one is."""
    return tl.sum(largest(numbers, tl.arange(0, 1), 0, first, end, BLOCK), axis=0)  # of one number


@triton.jit(do_not_specialize=["first", "end", "last"])
def write(
    scale, numbers, weights, packet, amax, first, end, last, elements, holder, sends_amax, bounds, BLOCK: tl.constexpr
):
    divisor = tl.load(scale)
    unscale = tl.div_rn(1.0, divisor)
    peak = greatest(numbers, first, end, BLOCK) * unscale
    finite = isfinite(greatest(numbers, 0, end, BLOCK)) & isfinite(peak)
    column, wide = tl.arange(0, BLOCK), unscale.to(tl.float64)
    spread, same = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for start in range(0, first, BLOCK):
        at = start + column
        size = tl.load(numbers + at, mask=at < first, other=0.0).to(tl.float64) * wide
        spread += tl.load(weights + at, mask=at < first, other=0.0) * (size * size)
        same += tl.load(weights + first + at, mask=at < first, other=0.0) * (size * size)
    shared = tl.where(finite, tl.sum(same, axis=0), 0.0)
    tl.store(packet + GRADIENTS, 1.0)
    tl.store(packet + BAD, tl.where(finite, 0.0, 1.0))
    tl.store(packet + BAD_LOSS, tl.where(isfinite(greatest(numbers, end, last, BLOCK)), 0.0, 1.0))
    tl.store(packet + SPREAD, tl.where(finite, tl.sum(spread, axis=0), 0.0))
    tl.store(packet + SAME, shared)
    tl.store(packet + SAME_SQUARED, shared * shared)
    tl.store(packet + HOLDERS, tl.where(finite & (first > 0), holder, 0.0))
    share = tl.load(numbers + last, mask=elements > 0, other=0.0).to(tl.float64)
    tl.store(packet + ABOVE, share * elements)
    tl.store(packet + ELEMENTS, elements)
    tl.store(packet + SCALE, divisor)
    tl.store(packet + SCALE_SQUARED, divisor.to(tl.float64) * divisor.to(tl.float64))
    tl.store(packet + SENDS_AMAX, sends_amax)
    tl.store(packet + ASKS_NORM, tl.where(first > 0, 1.0, 0.0))
    tl.store(packet + BOUNDS, bounds)
    tl.store(packet + BOUNDS_SQUARED, tl.full((), 1.0, tl.float64) * bounds * bounds)
    tl.store(packet + FOLLOWS, 0.0)
    tl.store(amax, tl.where(finite, peak, 0.0))


@triton.jit
def differ(total, squares, count, tolerance):
    """Returns whether numbers differ, as `packet.differ`."""
    return count * squares - total * total > tolerance * tolerance * total * total


@triton.jit
def read(
    scale,
    packet,
    amax,
    found,
    ranks,
    same_scale,
    same_gradients,
    NORM: tl.constexpr,
    PEAK: tl.constexpr,
    SHARE: tl.constexpr,
):
    divisor, holders = tl.load(scale), tl.load(packet + HOLDERS)
    parted = differ(tl.load(packet + SCALE), tl.load(packet + SCALE_SQUARED), ranks, same_scale)
    distinct = differ(tl.load(packet + SAME), tl.load(packet + SAME_SQUARED), holders, same_gradients)
    one, follow = tl.full((), 1.0, tl.float64), tl.load(packet + FOLLOWS)
    clips = differ(tl.load(packet + BOUNDS), tl.load(packet + BOUNDS_SQUARED), ranks - follow, same_scale)
    square = tl.load(packet + SPREAD) + tl.load(packet + SAME) / tl.where(holders > 1.0, holders, one)
    norm = tl.sqrt(square).to(tl.float32) * divisor
    finite = (tl.load(packet + BAD) == 0.0) & (parted == 0) & (distinct == 0) & (clips == 0) & (norm < FINITE_BELOW)
    if NORM:
        tl.store(found, tl.where(finite, norm, float("inf")))
    if PEAK:
        tl.store(found + NORM, tl.where(finite, tl.load(amax) * divisor, float("inf")))
    tl.store(found + (NORM + PEAK), tl.where(tl.load(packet + BAD_LOSS) == 0.0, 0.0, float("inf")))
    if SHARE:
        elements = tl.load(packet + ELEMENTS)
        tl.store(found + (NORM + PEAK + 1), tl.load(packet + ABOVE) / tl.where(elements > 1.0, elements, one))
    shown = found + (NORM + PEAK + 1 + SHARE)
    tl.store(shown, tl.where(parted, 1.0, 0.0))
    tl.store(shown + 1, tl.where(distinct, 1.0, 0.0))
    tl.store(shown + 2, tl.load(packet + SENDS_AMAX))
    tl.store(shown + 3, tl.load(packet + ASKS_NORM))
    tl.store(shown + 4, follow)
    tl.store(shown + 5, tl.where(clips, 1.0, 0.0))
