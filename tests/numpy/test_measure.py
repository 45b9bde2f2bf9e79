"""One read of an array: what it finds in every type, layout and size, and what the arrays of a step amount to."""

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradscale._chunks import CHUNK
from gradscale.engine.measurement import LARGEST_NORM
from gradscale.engine.plan import Plan
from gradscale.numpy.agree import agree
from gradscale.numpy.measure import ArrayMeasurement, measure
from gradscale.policies.contract import Seen

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

EVERYTHING = Plan(checks=True, amax=True, norm=True, edge=2.0)


def read(array: Array, divisor: float = 1.0, *, norm: bool = False, edge: float | None = None) -> ArrayMeasurement:
    return measure(array, divisor, Plan(checks=True, amax=True, norm=norm, edge=edge))


def seen(array: Array, divisor: float, *, norm: bool = True) -> Seen:
    """Returns what is seen of one array, unscaled."""
    plan = replace(EVERYTHING, norm=norm)
    measurement = agree([measure(array, divisor, plan)], plan)
    return measurement.seen(np.float32(divisor), np.bool_(True), np)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_is_measured_unscaled(dtype: Any) -> None:
    array = np.array([[3.0, -4.0], [0.0, 0.0]]).astype(dtype)
    found = seen(array, 2.0)
    assert (found.amax, found.norm, found.finite, read(array, 2.0).size) == (2.0, 2.5, True, 4)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_shows_its_nans(dtype: Any) -> None:
    array = np.array([1.0, math.nan, 2.0]).astype(dtype)
    assert (read(array).nonfinite, math.isnan(read(array).amax)) == (1, True)
    assert (seen(array, 1.0).finite, seen(array, 1.0).amax, seen(array, 1.0).norm) == (False, math.inf, math.inf)


@pytest.mark.parametrize("dtype", [dtype for dtype in TYPES if dtype is not ml_dtypes.float8_e4m3fn], ids=str)
def test_every_type_shows_its_infinities(dtype: Any) -> None:
    array = np.array([1.0, math.inf, -math.inf]).astype(dtype)
    assert (read(array).nonfinite, read(array).amax) == (2, math.inf)
    assert (seen(array, 1.0).finite, seen(array, 1.0).amax, seen(array, 1.0).norm) == (False, math.inf, math.inf)


def test_a_complex_array_counts_as_its_parts() -> None:
    found = read(np.array([3 + 4j, complex(math.inf, math.nan)], np.complex64))
    assert (math.isnan(found.amax), found.nonfinite) == (True, 2)
    found = read(np.array([3 + 4j, complex(math.inf, -5)], np.complex64))
    assert (found.amax, found.nonfinite) == (math.inf, 1)
    assert read(np.array([3 + 4j], np.complex64)).amax == 4.0


def test_a_scalar_array_is_measured() -> None:
    found = read(np.array(-2.0, np.float16), norm=True)
    assert (found.amax, found.norm, found.size) == (2.0, 2.0, 1)


def test_an_empty_array_is_finite_and_measures_zero() -> None:
    found = read(np.empty((3, 0), np.float32), norm=True)
    assert found == ArrayMeasurement(amax=0.0, norm=0.0, nonfinite=0, above=0, size=0)


def test_the_norm_is_zero_where_it_was_not_asked_for() -> None:
    assert read(np.array([math.nan, 3.0])).norm == 0.0


def test_the_norm_of_an_array_with_a_nan_is_nan() -> None:
    assert math.isnan(read(np.array([math.nan, 3.0]), norm=True).norm)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1e307])
def test_norms_of_extreme_float64_neither_overflow_nor_vanish(size: float) -> None:
    assert read(np.array([3.0, 4.0]) * size, norm=True).norm == pytest.approx(5.0 * size, rel=1e-3)


def test_float16_squares_do_not_overflow() -> None:
    assert read(np.full(10_000, 60_000, np.float16), norm=True).norm == pytest.approx(60_000 * 100, rel=1e-3)


def test_a_large_sum_of_small_squares_keeps_every_digit() -> None:
    tiny = np.full(1_000_000, 1e-4, np.float32)
    tiny[0] = 1.0
    true = math.sqrt(1.0 + 999_999 * float(tiny[1]) ** 2)
    assert read(tiny, norm=True).norm == pytest.approx(true, rel=1e-13)


@pytest.mark.parametrize("where", [0, CHUNK - 1, CHUNK, 3 * CHUNK + 4])
def test_a_single_bad_element_is_found_wherever_it_is(where: int) -> None:
    array = np.ones(3 * CHUNK + 5, np.float16)
    array[where] = math.inf
    assert read(array).nonfinite == 1


def test_no_temporary_grows_with_the_array() -> None:
    array = np.ones((1000, 4000), np.float16)[:, ::2].T
    tracemalloc.start()
    read(array, norm=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000 < array.nbytes


def test_elements_that_unscaling_makes_infinite_are_counted() -> None:
    found = read(np.array([1.0, 1e30, 2e30], np.float32), 2.0**-100)
    assert (found.nonfinite, found.amax) == (2, math.inf)


def test_the_same_elements_stay_finite_in_float64() -> None:
    array = np.array([1.0, 1e30, 2e30])
    assert (read(array, 2.0**-100).nonfinite, seen(array, 2.0**-100, norm=False).finite) == (0, True)


@pytest.mark.parametrize(("norm", "finite"), [(LARGEST_NORM, False), (LARGEST_NORM * (1 - 2.0**-53), True)])
def test_a_norm_whose_square_does_not_fit_float32_is_an_overflow_in_any_type(norm: float, finite: bool) -> None:
    assert seen(np.array([norm]), 1.0).finite == finite


def test_a_signalling_nan_is_a_nan() -> None:
    found = read(np.array([0x7F800001], np.uint32).view(np.float32))
    assert (found.nonfinite, math.isnan(found.amax)) == (1, True)


def test_elements_above_the_edge_are_counted_and_so_are_inf_and_nan() -> None:
    found = read(np.array([1.0, -2.0, 2.5, math.nan, math.inf, -3.0]), 2.0, edge=2.0)
    assert found.above == 4


floats = hnp.arrays(np.float32, hnp.array_shapes(min_side=0, max_side=7), elements=st.floats(width=32))


@given(array=floats, exponent=st.integers(-100, 100))
def test_a_read_agrees_with_numpy(array: Array, exponent: int) -> None:
    divisor = np.float32(2.0**exponent)
    with np.errstate(over="ignore", invalid="ignore"):
        true = array / divisor
    found = read(array, float(divisor))
    assert found.nonfinite == (~np.isfinite(true)).sum()
    assert math.isnan(found.amax) == np.isnan(true).any()
    assert seen(array, float(divisor), norm=False).finite == np.isfinite(true).all()
    unscaled = seen(array, float(divisor))
    # A norm that was asked for counts too, and is inf from here on.
    assert unscaled.finite == (np.isfinite(true).all() and read(array, norm=True).norm < LARGEST_NORM)
    if unscaled.finite:
        magnitudes = np.abs(array.astype(np.float64)) / float(divisor)
        assert np.float32(unscaled.amax) == np.float32(magnitudes.max(initial=0.0))
        assert unscaled.norm == pytest.approx(math.sqrt((magnitudes**2).sum()), rel=1e-12)


def test_arrays_agree_on_the_largest_amax_the_joint_norm_and_the_joint_share() -> None:
    measurement = agree([ArrayMeasurement(3.0, 3.0, 0, 1, 1), ArrayMeasurement(4.0, 4.0, 0, 0, 3)], EVERYTHING)
    assert measurement.sizes is not None
    assert (measurement.sizes.tolist(), measurement.total) == ([3.0, 4.0], 4.0)
    assert (measurement.amax, measurement.norm, measurement.upper_share) == (4.0, 5.0, 0.25)
    found = measurement.seen(np.float32(1), np.bool_(True), np)
    assert (found.finite, found.loss_finite) == (True, True)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_array_that_is_not_finite_is_enough(bad: float) -> None:
    clean, overflowed = ArrayMeasurement(1.0, 0.0, 0, 0, 1), ArrayMeasurement(bad, 0.0, 1, 1, 1)
    measurement = agree([clean, overflowed, clean], EVERYTHING)
    assert not measurement.seen(np.float32(1), np.bool_(True), np).finite


def test_what_was_not_asked_for_is_not_known() -> None:
    plan = Plan(checks=True, amax=False, norm=False, edge=None)
    measurement = agree([measure(np.ones(3), 1.0, plan)], plan)
    assert (measurement.norm, measurement.upper_share) == (None, None)
