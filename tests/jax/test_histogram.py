"""Exponent histograms of pytrees have exactly the counts of numpy's, compiled or not."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.jax.versions import enable_x64

from gradscale import FP16
from gradscale import histogram as reference
from gradscale.jax.histogram import block_histogram, exponent_histogram
from gradscale.kernels.jax_exponents import CHUNK

compiled = jax.jit(exponent_histogram)


def assert_same(found: reference.ExponentHistogram, expected: reference.ExponentHistogram) -> None:
    np.testing.assert_array_equal(found.host_counts, expected.counts)
    assert [int(found.zeros), int(found.infs), int(found.nans)] == [expected.zeros, expected.infs, expected.nans]


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn], ids=lambda d: d.__name__
)
def test_every_bit_pattern_of_narrow_types_is_counted(dtype: type) -> None:
    bits = 8 * np.dtype(dtype).itemsize
    values = np.arange(2**bits).astype(f"uint{bits}").view(dtype)
    assert_same(compiled(values), reference.exponent_histogram(values))


def test_bit_patterns_of_float32_are_counted_subnormals_included() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, CHUNK + 12_345, np.uint32)
    bits[:20_000] &= 0x807FFFFF  # subnormal numbers
    bits[-4:] = 0, 2**31, 1, 0x7F800000
    values = bits.view(np.float32)
    assert_same(compiled(values), reference.exponent_histogram(values))


def test_numbers_of_few_exponents_with_rare_ones_between_are_counted() -> None:
    values = np.random.default_rng(0).standard_normal(2 * CHUNK + 77).astype(np.float32)
    values[::3] = 0
    values[[5, CHUNK, -1]] = np.nan, -np.inf, 1e-40
    histogram = reference.exponent_histogram(values)
    assert_same(compiled(values), histogram)
    assert_same(exponent_histogram(values), histogram)


def test_float64_is_counted_by_its_own_exponent_and_beyond_float32_in_the_end_bins() -> None:
    values = np.array([1e-300, 1e300, np.nextafter(2.0, 0), 0.0, np.nextafter(0.0, 1), np.inf, np.nan])
    with enable_x64():
        found = jax.device_get(compiled(jnp.asarray(values)))
    assert_same(found, reference.exponent_histogram(values))


def test_a_pytree_is_counted_together_without_its_integers() -> None:
    tree = {"a": np.array([[1.0, 0.0]], np.float32), "b": [np.array([1 + 4j], np.complex64), 3, jnp.arange(3), None]}
    expected = reference.exponent_histogram([np.array([1.0, 0.0, 1.0, 4.0], np.float32)])
    assert_same(compiled(tree), expected)


def test_histograms_stack_under_vmap_and_scan() -> None:
    values = np.array([[1.0, 2.0], [0.0, 0.5]], np.float32)
    stacked = jax.vmap(exponent_histogram)(values)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, exponent_histogram(row)), 0, values)
    for histograms in (stacked, scanned):
        second: Any = jax.tree.map(lambda leaf: leaf[1], histograms)
        assert_same(second, reference.exponent_histogram(values[1]))


def test_functions_of_the_core_take_the_result() -> None:
    values = np.array([1e-8, 1e-3], np.float32)
    histogram, expected = compiled(values), reference.exponent_histogram(values)
    assert reference.losses(histogram, FP16) == reference.losses(expected, FP16)
    assert reference.best_static_scale(histogram) == reference.best_static_scale(expected)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        *(((7, 100), 16), ((3, 5, 33), 16), ((1000, 1000), 16), ((5, 0), 16), ((0, 5), 16), ((), 16), ((3,), 16)),
        *(((7, 100), 7), ((3, 5, 33), 7), ((1000, 1000), 7), ((3,), 7)),
    ],
)
def test_blocks_are_counted_as_in_numpy(shape: tuple[int, ...], block: int) -> None:
    values = np.asarray(np.random.default_rng(0).standard_normal(shape), np.float32)
    values = np.where(values > 0.7, values, np.float32(0))
    if values.size > 100:
        values.flat[3], values.flat[50] = np.nan, -np.inf
    assert_same(jax.jit(lambda x: block_histogram(x, block))(values), reference.block_histogram(values, block))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_large_array_is_counted_without_a_copy_of_it(dtype: str) -> None:
    array = jax.ShapeDtypeStruct((200 * CHUNK,), dtype)
    needed = jax.jit(exponent_histogram).lower(array).compile().memory_analysis()
    assert needed is not None
    assert needed.temp_size_in_bytes < 32 * CHUNK
