"""Exponent histograms of JAX arrays, by the bits of their numbers, in chunks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradscale.histogram.counts import EXPONENTS, HIGHEST_EXPONENT, LOWEST_EXPONENT
from gradscale.kernels.jax import peak, real_parts, wide_type

ROWS, COLUMNS = 128, 1024
CHUNK = ROWS * COLUMNS
"""Elements that are counted together. 128 rows, since a byte holds the sum of as many ones."""

LENGTHS = tuple(CHUNK // 16**power for power in (3, 2, 1, 0))
"""What small arrays are padded to: 32, 512, 8,192 elements or a chunk."""

FEW = 64
"""Exponents in a chunk up to which comparing it with each of them is faster than XLA's scatter on a CPU."""


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

    @property
    def bins(self) -> Any:
        """The bin of each field between the first and the last; beyond the bins, the first and the last bin."""
        return _bins_of(np.arange(1, self.last) - self.last // 2)

    @property
    def subnormal_bins(self) -> Any:
        """The bin of a subnormal number by the position of its leading bit."""
        return _bins_of(np.arange(self.mantissa_bits + 1) + 1 - self.last // 2 - self.mantissa_bits)


SINGLE = Layout("uint32", 23, 255)
DOUBLE = Layout("uint64", 52, 2047)


class Counts(NamedTuple):
    """Elements by exponent, and those that have none, as uint32."""

    bins: Array
    zeros: Array
    infs: Array
    nans: Array


def exponent_counts(array: Array) -> Counts:
    """Returns elements by exponent; zeros, infs and NaNs. A complex array counts as its two parts.

    In a compiled function it makes no temporary larger than a chunk on a CPU. Elsewhere it scatters all elements.
    """
    return _sum([_counted(part.reshape(-1), _bits) for part in real_parts(array)])


def counts_of_each(arrays: Sequence[Array]) -> Counts:
    """Returns the counts of each array, stacked in their order, in a program that takes less time to compile.

    Arrays of at most a chunk are padded to one of a few lengths, and one loop counts all of a length.
    """
    places: list[int] = []
    found = [Counts(jnp.zeros((0, EXPONENTS.size), "uint32"), *[jnp.zeros(0, "uint32")] * 3)]
    small: dict[int, list[tuple[int, Array]]] = {}
    for place, array in enumerate(arrays):
        for part in (part.reshape(-1) for part in real_parts(array)):
            if part.size > CHUNK or _layout(part) is DOUBLE:
                found.append(Counts(*(leaf[None] for leaf in _counted(part, _bits))))
                places.append(place)
            else:
                length = next(length for length in LENGTHS if part.size <= length)
                small.setdefault(length, []).append((place, part))
    for length, parts in small.items():
        found.append(_padded_counts([part for _, part in parts], length))
        places.extend(place for place, _ in parts)
    # Added, not put in order: a complex array has two parts.
    stacked = [jnp.concatenate(leaves) for leaves in zip(*found, strict=True)]
    return Counts(
        *(jnp.zeros((len(arrays), *leaf.shape[1:]), "uint32").at[np.array(places)].add(leaf) for leaf in stacked)
    )


@jax.jit
def counts_and_peaks(arrays: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """Returns bins, zeros, infs and NaNs, and largest magnitudes of arrays, in rows; NaN where an array has one."""
    found = counts_of_each(arrays)
    peaks = jnp.stack([peak(array) for array in arrays]) if arrays else jnp.zeros(0)
    return found.bins, jnp.stack([found.zeros, found.infs, found.nans], axis=1), peaks


def block_counts(array: Array, block: int) -> Counts:
    """Returns the same for the largest magnitude of each block of `block` elements along the last dimension."""
    return _sum([_counted(_blocks(part, block), _block_peaks) for part in real_parts(array)])


def _bins_of(exponents: Any) -> Any:
    return np.clip(exponents, LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT


def _sum(parts: list[Counts]) -> Counts:
    return parts[0] if len(parts) == 1 else Counts(*(a + b for a, b in zip(*parts, strict=True)))


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


def _counted(items: Array, bits_of: Callable[[Array], Array]) -> Counts:
    """Returns the counts of the numbers that `bits_of` makes of items along the first dimension."""
    layout = _layout(items)
    on_cpu = partial(_in_chunks, bits_of, layout)
    return lax.platform_dependent(items, cpu=on_cpu, default=lambda all: _scattered(bits_of(all), layout))


def _padded_counts(parts: Sequence[Array], length: int) -> Counts:
    """Returns the counts of vectors of at most `length` numbers, stacked."""
    rows = jnp.stack([jnp.pad(_bits(part), (0, length - part.size)) for part in parts])
    counts = lax.platform_dependent(rows, cpu=partial(_each_row, _compared), default=partial(_each_row, _scattered))
    padding = np.array([length - part.size for part in parts], "uint32")
    return counts._replace(zeros=counts.zeros - padding)


def _each_row(count: Callable[[Array, Layout], Counts], rows: Array) -> Counts:
    """Returns the counts of each row of bits, stacked: one after the other, by one compiled body."""
    return lax.map(lambda row: count(row, SINGLE), rows)


def _compared(bits: Array, layout: Layout) -> Counts:
    return _chunk_counts(bits.reshape(min(ROWS, len(bits)), -1), layout)


def _in_chunks(bits_of: Callable[[Array], Array], layout: Layout, items: Array) -> Counts:
    whole = len(items) // CHUNK

    def add(index: Any, total: Counts) -> Counts:
        chunk = bits_of(lax.dynamic_slice_in_dim(items, index * CHUNK, CHUNK))
        return _sum([total, _chunk_counts(chunk.reshape(ROWS, COLUMNS), layout)])

    rest = bits_of(items[whole * CHUNK :])
    columns = max(1, -(-len(rest) // ROWS))
    missing = ROWS * columns - len(rest)
    tail = _chunk_counts(jnp.pad(rest, (0, missing)).reshape(ROWS, columns), layout)
    tail = tail._replace(zeros=tail.zeros - np.uint32(missing))
    return lax.fori_loop(0, whole, add, tail) if whole else tail


def _chunk_counts(bits: Array, layout: Layout) -> Counts:
    """Returns the counts of a chunk, by comparing it with each exponent where there are few."""
    fields = (bits >> layout.mantissa_bits).astype("uint8" if layout is SINGLE else "uint16")
    # Else XLA computes the fields anew for each comparison.
    fields = lax.optimization_barrier(fields)
    # Zeros, which are common, and inf and NaN would make the range of exponents wide.
    normal = (fields != 0) & (fields != layout.last)
    lowest = jnp.min(jnp.where(normal, fields, layout.last)).astype("int32")
    highest = jnp.max(jnp.where(normal, fields, 0)).astype("int32")

    def compared() -> Counts:
        counts = lax.fori_loop(lowest, highest + 1, count_one, jnp.zeros(layout.last + 1, "uint32"))
        bins = jnp.zeros(EXPONENTS.size, "uint32").at[layout.bins].add(counts[1 : layout.last])
        zero = jnp.zeros((), "uint32")
        common = Counts(bins, _how_many(bits == 0), zero, zero)
        rare = ~normal & (bits != 0)
        return lax.cond(jnp.any(rare), lambda: _sum([common, _rare(bits, rare, layout)]), lambda: common)

    def count_one(field: Any, counts: Array) -> Array:
        return counts.at[field].add(_how_many(fields == field.astype(fields.dtype)))

    return lax.cond(highest - lowest < FEW, compared, lambda: _scattered(bits.reshape(-1), layout))


def _how_many(flags: Array) -> Array:
    """Returns the number of flags that are set in a chunk."""
    # Summed as bytes along the rows: 32 of them fit a register.
    return jnp.sum(jnp.sum(flags.astype("uint8"), axis=0, dtype="uint8"), dtype="uint32")


def _rare(bits: Array, rare: Array, layout: Layout) -> Counts:
    """Returns the counts of the numbers of a chunk that `rare` marks, none of which is zero."""
    counts = _scattered(jnp.where(rare, bits, 0).reshape(-1), layout)
    return counts._replace(zeros=jnp.zeros((), "uint32"))


def _scattered(bits: Array, layout: Layout) -> Counts:
    """Returns the counts by adding 1 at the place of each number."""
    fields = (bits >> layout.mantissa_bits).astype("int32")
    # The mantissa of a subnormal number, as an integer, is a whole number of the smallest ones.
    leading = np.dtype(layout.integer).itemsize * 8 - 1 - lax.clz(bits).astype("int32")
    bins = jnp.asarray(np.pad(layout.bins, 1), "int32")[fields]
    subnormal = jnp.asarray(layout.subnormal_bins, "int32")[jnp.clip(leading, 0, layout.mantissa_bits)]
    inf = np.array(layout.last << layout.mantissa_bits, layout.integer)
    zeros, infs, nans = EXPONENTS.size, EXPONENTS.size + 1, EXPONENTS.size + 2
    places = jnp.where(fields == 0, jnp.where(bits == 0, zeros, subnormal), bins)
    places = jnp.where(fields == layout.last, jnp.where(bits == inf, infs, nans), places)
    counts = jnp.zeros(EXPONENTS.size + 3, "uint32").at[places].add(np.uint32(1), mode="promise_in_bounds")
    return Counts(counts[:zeros], counts[zeros], counts[infs], counts[nans])
