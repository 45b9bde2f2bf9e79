"""What the scaler refuses: losses that cannot be meant."""

from typing import Any

import numpy as np

from gradscale.numpy.tree import WIDE, FloatArray


def checked_loss(loss: Any) -> FloatArray:
    """Returns `loss` as an array; raises if it is not a real floating-point number, or an array of them."""
    values: FloatArray = np.asarray(loss)
    if values.dtype.name not in WIDE or values.dtype.kind == "c":
        raise TypeError(
            f"`loss` must be a floating-point number or array. Received: loss={loss!r} ({values.dtype.name})."
        )
    return values
