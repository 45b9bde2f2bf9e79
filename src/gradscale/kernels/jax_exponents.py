"""Exponent histograms of JAX arrays, by the bits of their numbers, in chunks."""

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradscale.histogram.counts import EXPONENTS, HIGHEST_EXPONENT, LOWEST_EXPONENT
from gradscale.kernels.jax import peak, real_parts, wide_type

CHUNK = 131_072
"""Elements that are counted together on a CPU."""


class Layout(NamedTuple):
    """How the bits of a floating-point type are laid out.

    Attributes:
        integer: the unsigned integer type of the same size.
        mantissa_bits: explicit bits of the mantissa. Above it are the field of the exponent and the sign.
        last: the highest value of that field: that of inf and NaN.
    """

    integer: str
    mantissa_bits: int
    last: int


SINGLE = Layout("uint32", 23, 255)
DOUBLE = Layout("uint64", 52, 2047)


def exponent_counts(array: Array) -> Array:
    """Returns elements by exponent, then zeros, infs and NaNs, as uint32. A complex array counts as its two parts.

    In a compiled function it makes no temporary larger than a chunk on a CPU. Elsewhere it scatters all elements.
    """
    return reduce(add, [_counted(part.reshape(-1), _bits) for part in real_parts(array)])


def block_counts(array: Array, block: int) -> Array:
    """Returns the same for the largest magnitude of each block of `block` elements along the last dimension."""
    return reduce(add, [_counted(_blocks(part, block), _block_peaks) for part in real_parts(array)])


@jax.jit
def counts_and_peaks(arrays: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """Returns bins, zeros, infs and NaNs, and largest magnitudes of arrays, in rows; NaN where an array has one."""
    counts = jnp.stack([exponent_counts(array) for array in arrays])
    return counts[:, : EXPONENTS.size], counts[:, EXPONENTS.size :], jnp.stack([peak(array) for array in arrays])


def _layout(array: Array) -> Layout:
    return DOUBLE if wide_type(array) == jnp.dtype("float64") else SINGLE


def _bits(values: Array) -> Array:
    """Returns the bits of each magnitude."""
    layout = _layout(values)
    if values.dtype == jnp.bfloat16:
        # The upper half of a float32. A cast may flush subnormal numbers.
        return (lax.bitcast_convert_type(values, "uint16") & np.uint16(0x7FFF)).astype("uint32") << 16
    sign = np.array(2 ** (np.dtype(layout.integer).itemsize * 8 - 1) - 1, layout.integer)
    return lax.bitcast_convert_type(values.astype(wide_type(values)), layout.integer) & sign


def _blocks(array: Array, block: int) -> Array:
    """Returns the array with a row for each block; short blocks are filled with zeros."""
    rows = jnp.atleast_1d(array)
    missing = -rows.shape[-1] % block
    filled = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else rows
    return filled.reshape(-1, block)


def _block_peaks(blocks: Array) -> Array:
    # Compared by their bits, which have the order of the magnitudes, NaN above inf: XLA's maximum may lose a NaN.
    return jnp.max(_bits(blocks), axis=1, initial=0)


def _counted(items: Array, bits_of: Callable[[Array], Array]) -> Array:
    """Returns the counts of the numbers that `bits_of` makes of items along the first dimension."""
    layout = _layout(items)
    on_cpu = partial(_in_chunks, bits_of, layout)
    return lax.platform_dependent(items, cpu=on_cpu, default=lambda all: _scattered(bits_of(all), layout))


def _in_chunks(bits_of: Callable[[Array], Array], layout: Layout, items: Array) -> Array:
    whole = len(items) // CHUNK

    def with_chunk(index: Any, total: Array) -> Array:
        return total + _scattered(bits_of(lax.dynamic_slice_in_dim(items, index * CHUNK, CHUNK)), layout)

    rest = _scattered(bits_of(items[whole * CHUNK :]), layout)
    return lax.fori_loop(0, whole, with_chunk, rest) if whole else rest


def _scattered(bits: Array, layout: Layout) -> Array:
    """Returns the counts by adding 1 at the place of each number."""
    fields = (bits >> layout.mantissa_bits).astype("int32")
    # The mantissa of a subnormal number, as an integer, is a whole number of the smallest ones.
    leading = np.dtype(layout.integer).itemsize * 8 - 1 - lax.clz(bits).astype("int32")
    exponents = jnp.where(fields == 0, leading + 1 - layout.mantissa_bits, fields) - layout.last // 2
    bins = jnp.clip(exponents, LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
    inf = np.array(layout.last << layout.mantissa_bits, layout.integer)
    zeros, infs, nans = EXPONENTS.size, EXPONENTS.size + 1, EXPONENTS.size + 2
    places = jnp.where(bits == 0, zeros, bins)
    places = jnp.where(fields == layout.last, jnp.where(bits == inf, infs, nans), places)
    return jnp.zeros(EXPONENTS.size + 3, "uint32").at[places].add(np.uint32(1), mode="promise_in_bounds")
