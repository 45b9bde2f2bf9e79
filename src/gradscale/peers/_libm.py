"""Logarithm and power as TensorFlow's CPU kernels round them for a scalar: the C library's own, in float32."""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gradscale.engine.host import SCALARS
from gradscale.record import Array

LOG2_E = float(np.float32(1) / np.float32(math.log(2)))
"""What TensorFlow multiplies by where a program divides by the logarithm of 2."""


def log2(x: Array, xp: Any) -> Array:
    """Returns the base-2 logarithm of float32 numbers: natural logarithm, then a rounded constant.

    To the bit as TensorFlow has it where numpy runs it; elsewhere the framework's own logarithm, which may be off by
    a unit in the last place.
    """
    return (_on_each(_c_function("logf", 1), x) if xp in (np, SCALARS) else xp.log(x)) * LOG2_E


def exp2(x: Array, xp: Any) -> Array:
    """Returns 2 to the power of float32 numbers, as exactly as `log2` does."""
    return _on_each(functools.partial(_c_function("powf", 2), 2.0), x) if xp in (np, SCALARS) else 2.0**x


@np.errstate(all="ignore")
def _on_each(function: Callable[..., float], x: Array) -> Array:
    return np.asarray(np.frompyfunc(function, 1, 1)(np.float32(x)), dtype=np.float32)[()]


@functools.cache
def _c_function(name: str, arity: int) -> Callable[..., float]:
    """Returns a float32 function of the C library, or its float64 twin where the library cannot be asked.

    The twin, rounded to float32, differs from the usual C libraries by a unit in the last place for one number in a
    thousand.
    """
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (TypeError, OSError, AttributeError):
        return {"logf": np.log, "powf": np.power}[name]
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * arity
    return function
