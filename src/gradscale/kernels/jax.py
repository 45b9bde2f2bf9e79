"""Sizes of one JAX array: largest magnitude, sums of magnitudes and squares, elements above an edge; and its text."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer


def peak(gradient: Array) -> Array:
    """Returns the largest magnitude; inf or NaN where there is one.

    Numbers are compared by their bits, which as integers have the order of the magnitudes, NaN above inf. Compared as
    floating-point numbers, a NaN is lost: in XLA's kernel for the CPU from 4,096 elements on.
    """
    # `max(where(isfinite(x), abs(x), inf))` is one read too, but reports a NaN as inf.
    parts = [_peak_by_bits(part) for part in real_parts(gradient)]
    return parts[0] if len(parts) == 1 else jnp.max(jnp.stack(parts))


def total(gradient: Array) -> Array:
    """Returns the sum of the magnitudes."""
    return jnp.sum(jnp.stack([jnp.sum(jnp.abs(part)) for part in _wide_parts(gradient)]))


def square(gradient: Array) -> Array:
    """Returns the sum of the squares."""
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(part)) for part in _wide_parts(gradient)]))


def share_above(gradients: Sequence[Array], edge: float) -> Array:
    """Returns the share of all elements whose magnitude is above `edge`; inf and NaN are. Complex ones count as two."""
    counts = [count_above(gradient, edge) for gradient in gradients]
    return jnp.sum(jnp.stack([jnp.float32(0), *counts])) / max(1, sum(map(elements, gradients)))


def count_above(gradient: Array, edge: float) -> Array:
    """Returns how many elements have a magnitude above `edge`, as a float32; inf and NaN do."""
    # Counted as integers: a float32 sum of ones stops at 2**24.
    counts = [jnp.sum(~(jnp.abs(part) <= edge), dtype=jnp.uint32).astype(jnp.float32) for part in _wide_parts(gradient)]
    return counts[0] if len(counts) == 1 else counts[0] + counts[1]


def elements(gradient: Array) -> int:
    """Returns how many real numbers the array holds."""
    return sum(part.size for part in real_parts(gradient))


def real_parts(gradient: Array) -> tuple[Array, ...]:
    """Returns the array, or its real and imaginary parts where it is complex."""
    return (gradient.real, gradient.imag) if jnp.iscomplexobj(gradient) else (gradient,)


def wide_type(gradient: Array) -> Any:
    """Returns the type of an unscaled gradient: its own, or float32 where that is narrower, so that nothing is lost."""
    return gradient.dtype if gradient.dtype.itemsize >= 4 else jnp.dtype("float32")


def _wide_parts(gradient: Array) -> list[Array]:
    """Returns the real parts in the type in which sizes are added up: float32, or float64 where the array is."""
    return [part.astype(wide_type(part)) for part in real_parts(gradient)]


def _peak_by_bits(part: Array) -> Array:
    known = part.astype(wide_type(part)) if part.itemsize == 1 else part  # FP8 types differ in which bits mean NaN
    width = 8 * known.itemsize
    # Without the sign bit. `initial=0` is for empty gradients, on which `jnp.max` raises.
    bits = lax.bitcast_convert_type(known, f"int{width}") & np.array(2 ** (width - 1) - 1, f"int{width}")
    return lax.bitcast_convert_type(jnp.max(bits, initial=0), known.dtype).astype(wide_type(part))


def place(value: Any) -> str:
    """Returns why an array cannot be read without synchronizing, as in `<on cuda:0>`; nothing where it can."""
    if isinstance(value, Tracer):
        return "<traced>"
    if not isinstance(value, jax.Array):
        return ""
    if value.is_deleted():
        return "<donated>"
    device = min(value.devices(), key=str)
    if device.platform != "cpu" or not value.is_fully_addressable:
        return f"<on {device}>"
    is_ready: Any = getattr(value, "is_ready")  # noqa: B009 - not in the public class, which type checkers know
    return "" if is_ready() else "<not computed yet>"


def shown(value: Any) -> Any:
    """Returns a number that can be read without synchronizing, and for all else a text, as in `<on cuda:0>`.

    Takes leaves of any kind: those of a pytree may be no numbers at all.
    """
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, jax.Array | np.generic | np.ndarray):
        return f"<{type(value).__name__}>"
    if elsewhere := place(value):
        return elsewhere
    return f"<shape {value.shape}>" if value.ndim else value.item()
