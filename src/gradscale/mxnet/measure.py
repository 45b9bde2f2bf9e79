"""Measure: one read of the gradients on each context."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mxnet import nd

from gradscale.engine.plan import Plan
from gradscale.formats import FP32

Array = np.ndarray[Any, Any]

PIECE = 2**13
"""Elements per sum. MXNet's kernel adds one after the other in float32, and loses 7% of a sum of 30 million."""

ARRAYS = 200
"""Arrays per kernel, as in MXNet's own amp."""

SHRINK = 2.0**-96
"""Brings every float32 number below 2**32, so that 2**13 squares add up to less than 2**77."""

SMALL = 2.0**-40
"""Norm below which squares may have vanished in float32. Those of numbers this small, divided by SHRINK, do not."""


class ContextMeasurement(NamedTuple):
    """What was found on one context, still scaled.

    Attributes:
        sizes: norm of each gradient; inf or NaN where the gradient holds one.
        amax: largest magnitude of any; 0 where the plan does not read it.
        above: share of the elements above the edge that a policy watches; 0 where there is none.
    """

    sizes: Array
    amax: float
    above: float


def measure(contexts: Sequence[Sequence[Any]], plan: Plan) -> list[ContextMeasurement]:
    """Returns what was found on each context. Synchronizes with all of them, once all kernels are launched.

    The sum of squares gives the norm, and is not finite if an element is not.
    """
    # On a CPU it takes a quarter of the time of MXNet's own finite check, `multi_all_finite`, or less.
    launched = [_launch(arrays, plan) for arrays in contexts]
    return [_read(arrays, *found) for arrays, found in zip(contexts, launched, strict=True)]


def _launch(arrays: Sequence[Any], plan: Plan) -> tuple[Any, Any, Any]:
    """Returns sums of squares, and peaks and flags where the plan reads them. Does not synchronize with the device."""
    # `multi_sum_sq` of FP16 arrays overflows.
    wide = [array.astype("float32", copy=False) for array in arrays]
    # In float64: a finite peak of a float64 array may not fit float32.
    peaks = [array.abs().max().astype("float64") for array in arrays if array.size] if plan.amax else []
    below = [] if plan.edge is None else [array.abs() <= plan.edge for array in wide]
    return _squares(wide), nd.concat(*peaks, dim=0) if peaks else None, _squares(below)


def _read(arrays: Sequence[Any], squares: list[Any], peaks: Any, below: list[Any]) -> ContextMeasurement:
    """Returns what was launched as numbers. Synchronizes with the device."""
    counts = [_pieces(array) for array in arrays]
    total = sum(array.size for array in arrays)
    # 0 and 1 are their own squares, so the same kernel counts the elements that are not above the edge. NaN is above.
    kept = _summed(below, counts).sum() if below else total
    return ContextMeasurement(
        sizes=_norms(arrays, squares, counts),
        # `nanmax`: a NaN is reported by `sizes`.
        amax=0.0 if peaks is None else float(np.nanmax(peaks.asnumpy(), initial=0.0)),
        above=float(total - kept) / max(1, total),
    )


def _norms(arrays: Sequence[Any], squares: list[Any], counts: Sequence[int]) -> Array:
    """Returns the norm of each array. Reads again where squares of finite numbers may have overflowed or vanished."""
    # In float32 that is above 1.8e19, or where all numbers are very small. An array of zeros is read again too.
    norms = np.sqrt(_summed(squares, counts))
    again = np.flatnonzero(~((norms >= SMALL) & (norms < math.inf))).tolist()
    if not again:
        return norms
    factors = np.where(norms < SMALL, 1 / SHRINK, SHRINK)
    shifted = [(arrays[index].astype("float64") * factors[index]).astype("float32") for index in again]
    norms[again] = np.sqrt(_summed(_squares(shifted), [counts[index] for index in again])) / factors[again]
    for index in again:
        # The largest float32 stands for all that only float64 holds. Seldom enough to read it once more, on the host.
        if np.dtype(arrays[index].dtype) == np.float64 and np.isfinite(arrays[index].asnumpy()).all():
            norms[index] = min(norms[index], FP32.max)
    return norms


def _pieces(array: Any) -> int:
    return -(-array.size // PIECE)


def _squares(arrays: Sequence[Any]) -> list[Any]:
    """Returns the sums of squares of all pieces of the arrays, one after the other. Does not synchronize."""
    flat = [array.reshape((-1,)) for array in arrays if array.size]
    pieces = [array[start : start + PIECE] for array in flat for start in range(0, array.size, PIECE)]
    groups = [pieces[start : start + ARRAYS] for start in range(0, len(pieces), ARRAYS)]
    return [nd.multi_sum_sq(*group, num_arrays=len(group)) for group in groups]


def _summed(squares: Sequence[Any], counts: Sequence[int]) -> Array:
    """Returns a sum per array, in float64, of what `_squares` returned. Synchronizes with the device."""
    numbers = np.concatenate([np.empty(0), *(one.asnumpy() for one in squares)])
    ends = itertools.accumulate(counts)
    return np.array([numbers[end - count : end].sum() for count, end in zip(counts, ends, strict=True)])
