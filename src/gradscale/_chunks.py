"""A read of an array in pieces that fit the cache, as float64."""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

CHUNK = 8192
"""Elements of a chunk: 64 kB of float64 stay in the cache while they are read more than once."""

FloatArray = np.ndarray[Any, Any]


def parts(array: FloatArray) -> tuple[FloatArray, ...]:
    """Returns views of the real and the imaginary part of a complex array; of any other, the array itself."""
    return (array.real, array.imag) if array.dtype.kind == "c" else (array,)


def chunks(array: FloatArray) -> Iterator[FloatArray]:
    """Yields every element of `array` once, in flat float64 chunks that the caller must not keep or change.

    A complex array yields its real parts, then its imaginary parts. No temporary larger than a chunk is made, whatever
    the type or the layout.
    """
    for part in parts(array):
        pieces = np.nditer(
            part,
            flags=["external_loop", "buffered", "zerosize_ok"],
            op_dtypes=[np.float64],
            casting="same_kind",
            order="K",
            buffersize=CHUNK,
        )
        # One operand: nditer then yields arrays, not the tuples that its annotation promises.
        yield from cast(Iterator[FloatArray], pieces)
