"""What is measured in MXNet's arrays is what the reference finds in numpy's."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import nd

from gradscale import Dynamic, Headroom, Histogram, Seen
from gradscale.engine.plan import Plan
from gradscale.mxnet.agree import agree
from gradscale.mxnet.measure import ARRAYS, PIECE, ContextMeasurement, measure
from gradscale.numpy.measure import measure as reference

EVERYTHING = Plan(checks=True, amax=True, norm=True, edge=2.0)

Numbers = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 3e38, -3e38, 1e-45, 2e19, 65504.0])
)


def measured(*arrays: Any, policy: Any = None) -> ContextMeasurement:
    contexts = [[nd.array(array, dtype=array.dtype) for array in arrays]]
    (found,) = measure(contexts, Plan.of(policy or Dynamic()))
    return found


def seen(contexts: list[ContextMeasurement], *, divisor: float, rescale: float) -> Seen:
    measurement = agree(contexts, EVERYTHING, divisor=divisor, rescale=rescale)
    with np.errstate(divide="ignore", invalid="ignore"):
        return measurement.seen(np.float32(divisor), np.bool_(True), np)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(Numbers, min_size=1, max_size=4), min_size=1, max_size=3))
def test_sizes_and_what_is_finite_are_those_of_the_reference(values: list[list[float]]) -> None:
    arrays = [np.array(value, np.float32) for value in values]
    expected = [reference(array, 1.0, EVERYTHING) for array in arrays]
    found = measured(*arrays, policy=Headroom())
    assert np.isfinite(found.sizes).tolist() == [math.isfinite(one.amax) for one in expected]
    for size, one in zip(found.sizes, expected, strict=True):
        if math.isfinite(one.amax):
            assert size == pytest.approx(one.norm, rel=1e-6, abs=0)
    if all(math.isfinite(one.amax) for one in expected):
        assert found.amax == max(one.amax for one in expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_anywhere_is_found(dtype: str, bad: float) -> None:
    for place in (0, PIECE - 1, PIECE, 2 * PIECE + 16):
        array = np.ones(2 * PIECE + 17, dtype)
        array[place] = bad
        sizes = measured(np.ones(3, dtype), array).sizes
        assert np.isfinite(sizes).tolist() == [True, False]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_norm_of_a_large_array_is_right_where_mxnets_own_is_not(dtype: str) -> None:
    array = np.random.default_rng(0).normal(size=2_000_000).astype(dtype)
    true = float(np.linalg.norm(array.astype(np.float64)))
    assert float(measured(array).sizes[0]) == pytest.approx(true, rel=2e-6)
    assert float(nd.array(array, dtype="float32").norm().asscalar()) != pytest.approx(true, rel=1e-4)


def test_float16_squares_do_not_overflow() -> None:
    assert measured(np.full(100, 60000, np.float16)).sizes[0] == pytest.approx(600000, rel=1e-3)


def test_more_arrays_than_a_kernel_takes_are_all_measured() -> None:
    arrays = [np.array([index], np.float32) for index in range(2 * ARRAYS + 3)]
    assert measured(*arrays).sizes.tolist() == list(range(2 * ARRAYS + 3))


def test_types_may_be_mixed() -> None:
    arrays = [np.array([3], dtype) for dtype in ("float16", "float32", "float64")]
    assert measured(*arrays, policy=Headroom()).sizes.tolist() == [3.0, 3.0, 3.0]


def test_the_share_above_an_edge_counts_what_is_not_finite() -> None:
    policy = Histogram()
    edge = policy.edge_magnitude
    array = np.array([0.0, edge, edge * 2, math.inf, math.nan, -edge * 2, 1.0, 0.0], np.float32)
    assert measured(array, policy=policy).above == 0.5


def test_the_largest_norm_and_magnitude_of_any_context_count() -> None:
    contexts = [ContextMeasurement(np.array([3.0, 4.0]), 2.0, 0.0), ContextMeasurement(np.array([6.0, 8.0]), 1.0, 0.5)]
    found = seen(contexts, divisor=2.0, rescale=0.5)
    assert (found.finite, found.norm, found.amax, found.upper_share) == (True, 2.5, 1.0, 0.5)
    contexts = [*contexts, ContextMeasurement(np.array([math.nan]), 0.0, 0.0)]
    found = seen(contexts, divisor=2.0, rescale=0.5)
    assert (found.finite, found.norm, found.amax) == (False, math.inf, math.inf)


def test_a_gradient_that_leaves_float32_when_it_is_divided_is_not_finite() -> None:
    context = ContextMeasurement(np.array([1.0, 1e15]), 1e15, 0.0)
    measurement = agree([context], EVERYTHING, divisor=2.0**-100, rescale=0.5)
    assert np.asarray(measurement.sizes).tolist() == [0.5, math.inf]
    assert seen([context], divisor=1.0, rescale=0.5).finite


def test_a_scale_of_zero_is_never_finite() -> None:
    assert not seen([ContextMeasurement(np.array([0.0]), 0.0, 0.0)], divisor=0.0, rescale=1.0).finite
