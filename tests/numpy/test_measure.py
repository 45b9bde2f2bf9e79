"""One read of an array: what it finds in every type, layout and size, and what the arrays of a step amount to."""

import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradscale._chunks import CHUNK
from gradscale.numpy.measure import Measured, agree, measure

Array = np.ndarray[Any, Any]

TYPES = [
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fn,
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
    np.dtype(">f4"),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_is_measured_in_true_units(dtype: Any) -> None:
    found = measure(np.array([[3.0, -4.0], [0.0, 0.0]]).astype(dtype), 0.5, norm=True)
    assert (found.amax, found.norm, found.finite, found.size) == (2.0, 2.5, True, 4)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_shows_its_nans(dtype: Any) -> None:
    found = measure(np.array([1.0, math.nan, 2.0]).astype(dtype), 1.0)
    assert (found.nans, found.infs, found.amax, found.finite) == (1, 0, 2.0, False)


@pytest.mark.parametrize("dtype", [dtype for dtype in TYPES if dtype is not ml_dtypes.float8_e4m3fn], ids=str)
def test_every_type_shows_its_infinities(dtype: Any) -> None:
    found = measure(np.array([1.0, math.inf, -math.inf]).astype(dtype), 1.0)
    assert (found.nans, found.infs, found.amax, found.finite) == (0, 2, 1.0, False)


def test_a_complex_array_counts_as_its_parts() -> None:
    found = measure(np.array([3 + 4j, complex(math.inf, math.nan)], np.complex64), 1.0)
    assert (found.amax, found.infs, found.nans) == (4.0, 1, 1)


def test_a_scalar_array_is_measured() -> None:
    found = measure(np.array(-2.0, np.float16), 1.0, norm=True)
    assert (found.amax, found.norm, found.size) == (2.0, 2.0, 1)


def test_an_empty_array_is_finite_and_measures_zero() -> None:
    found = measure(np.empty((3, 0), np.float32), 1.0, norm=True)
    assert found == Measured(amax=0.0, norm=0.0, infs=0, nans=0, above=0, size=0)


def test_the_norm_is_zero_where_it_was_not_asked_for() -> None:
    assert measure(np.array([math.nan, 3.0]), 1.0).norm == 0.0


def test_the_norm_of_an_array_with_a_nan_is_nan() -> None:
    assert math.isnan(measure(np.array([math.nan, 3.0]), 1.0, norm=True).norm)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1e307])
def test_norms_of_extreme_float64_neither_overflow_nor_vanish(size: float) -> None:
    assert measure(np.array([3.0, 4.0]) * size, 1.0, norm=True).norm == pytest.approx(5.0 * size, rel=1e-3)


def test_float16_squares_do_not_overflow() -> None:
    assert measure(np.full(10_000, 60_000, np.float16), 1.0, norm=True).norm == pytest.approx(60_000 * 100, rel=1e-3)


def test_a_large_sum_of_small_squares_keeps_every_digit() -> None:
    tiny = np.full(1_000_000, 1e-4, np.float32)
    tiny[0] = 1.0
    true = math.sqrt(1.0 + 999_999 * float(tiny[1]) ** 2)
    assert measure(tiny, 1.0, norm=True).norm == pytest.approx(true, rel=1e-13)


@pytest.mark.parametrize("where", [0, CHUNK - 1, CHUNK, 3 * CHUNK + 4])
def test_a_single_bad_element_is_found_wherever_it_is(where: int) -> None:
    array = np.ones(3 * CHUNK + 5, np.float16)
    array[where] = math.inf
    assert measure(array, 1.0).infs == 1


def test_no_temporary_grows_with_the_array() -> None:
    array = np.ones((1000, 4000), np.float16)[:, ::2].T
    tracemalloc.start()
    measure(array, 1.0, norm=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000 < array.nbytes


def test_elements_that_unscaling_makes_infinite_are_counted() -> None:
    found = measure(np.array([1.0, 1e30, 2e30], np.float32), 2.0**100)
    assert (found.infs, found.amax) == (2, math.inf)


def test_the_same_elements_stay_finite_in_float64() -> None:
    assert measure(np.array([1.0, 1e30, 2e30]), 2.0**100).finite


def test_a_signalling_nan_is_a_nan() -> None:
    assert measure(np.array([0x7F800001], np.uint32).view(np.float32), 1.0).nans == 1


def test_elements_above_the_edge_are_counted_and_so_are_inf_and_nan() -> None:
    found = measure(np.array([1.0, -2.0, 2.5, math.nan, math.inf, -3.0]), 0.5, edge=2.0)
    assert found.above == 4


floats = hnp.arrays(np.float32, hnp.array_shapes(min_side=0, max_side=7), elements=st.floats(width=32))


@given(array=floats, exponent=st.integers(-100, 100))
def test_a_read_agrees_with_numpy(array: Array, exponent: int) -> None:
    unscale = np.float32(2.0**exponent)
    with np.errstate(over="ignore", invalid="ignore"):
        true = array * unscale
    found = measure(array, float(unscale), norm=True)
    finite = np.abs(array[np.isfinite(array)].astype(np.float64)) * float(unscale)
    assert found.nans == np.isnan(true).sum()
    assert found.infs == np.isinf(true).sum()
    with np.errstate(over="ignore"):
        assert found.amax == np.float32(finite.max(initial=0.0))
    if found.finite:
        assert found.norm == pytest.approx(math.sqrt((finite**2).sum()), rel=1e-12)


def test_arrays_agree_on_the_largest_amax_the_joint_norm_and_the_joint_share() -> None:
    seen = agree(
        [Measured(amax=3.0, norm=3.0, infs=0, nans=0, above=1, size=1), Measured(4.0, 4.0, 0, 0, 0, 3)],
        loss_finite=True,
    )
    assert (seen.finite, seen.loss_finite) == (True, True)
    assert (seen.amax, seen.norm, seen.upper_share) == (4.0, 5.0, 0.25)


def test_one_array_that_is_not_finite_is_enough() -> None:
    clean, bad = Measured(1.0, 0.0, 0, 0, 0, 1), Measured(1.0, 0.0, 0, 1, 1, 1)
    assert not agree([clean, bad, clean], loss_finite=True).finite


def test_an_amax_that_float32_cannot_hold_is_agreed_on_as_its_maximum() -> None:
    assert agree([Measured(1e200, 0.0, 0, 0, 0, 1)], loss_finite=False).amax == np.finfo(np.float32).max
