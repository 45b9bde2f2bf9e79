"""Apply: every gradient times the one factor that unscales and clips."""

from typing import Any

import numpy as np

from gradscale._chunks import parts
from gradscale.numpy.tree import WIDE, FloatArray, mapped


def apply(grads: Any, factor: float) -> Any:
    """Returns the structure `grads` with every array times `factor`, in float32, or float64 where it came so.

    The arrays given are not changed.
    """
    return mapped(grads, lambda _, leaf: _times(np.asarray(leaf), factor))


def _times(array: FloatArray, factor: float) -> FloatArray:
    """Returns the product, computed in float64 piece by piece and rounded once."""
    product = np.empty(array.shape, WIDE[array.dtype.name])
    for source, target in zip(parts(array), parts(product), strict=True):
        with np.errstate(under="ignore", over="ignore", invalid="ignore"):
            np.multiply(source, factor, out=target, dtype=np.float64, casting="same_kind")
    return product
