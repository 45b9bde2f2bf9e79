"""Gradients in lists, tuples and dicts: their arrays by name, and the same structure with other arrays in it."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

FloatArray = np.ndarray[Any, Any]

WIDE = {
    "float8_e4m3fn": np.float32,
    "float8_e5m2": np.float32,
    "bfloat16": np.float32,
    "float16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "complex128": np.complex128,
}
"""The type of an unscaled gradient, by the type it came in: at least float32, so that unscaling loses nothing."""


def mapped(tree: Any, function: Callable[[str, Any], Any], path: tuple[str, ...] = ()) -> Any:
    """Returns `tree` with `function(name, leaf)` in place of every leaf.

    None stays: it stands for a parameter that has no gradient. A leaf is named by its path, as in `encoder.0.weight`.
    """
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        items = cast(Mapping[Any, Any], tree).items()
        return {key: mapped(value, function, (*path, str(key))) for key, value in items}
    if isinstance(tree, list | tuple):
        sequence = cast(tuple[Any, ...], tree)
        kind: Any = type(sequence)
        keys = getattr(kind, "_fields", range(len(sequence)))
        children = [mapped(value, function, (*path, str(key))) for key, value in zip(keys, sequence, strict=True)]
        return getattr(kind, "_make", kind)(children)  # the constructor of a namedtuple takes its fields one by one
    return function(".".join(path) or "grads", tree)


def named_arrays(tree: Any) -> list[tuple[str, FloatArray]]:
    """Returns the arrays of `tree` with their names, in order.

    Raises:
        TypeError: a leaf is not an array of floating-point or complex numbers.
    """
    found: list[tuple[str, FloatArray]] = []
    mapped(tree, lambda name, leaf: found.append((name, _checked(name, leaf))))
    return found


def _checked(name: str, leaf: Any) -> FloatArray:
    """Returns `leaf` as an array, if it is one that gradients can be in."""
    if not isinstance(leaf, np.ndarray | np.generic):
        raise TypeError(
            "Gradients must be numpy arrays, alone or in lists, tuples and dicts. "
            f"Received: {name!r} of type {type(leaf).__name__}. Make it one with `numpy.asarray(value, numpy.float32)`."
        )
    array: FloatArray = np.asarray(cast(Any, leaf))
    if array.dtype.name not in WIDE:
        raise TypeError(
            f"Gradients must have one of the types {', '.join(WIDE)}. "
            f"Received: {name!r} of type {array.dtype.name}. Convert it, for example with `array.astype('float32')`."
        )
    return array
