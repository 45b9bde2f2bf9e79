"""Exponent histograms, what a format and a scale lose of them, and the best static scale."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradscale import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, Format
from gradscale.histogram import (
    EXPONENTS,
    ExponentHistogram,
    best_static_scale,
    exponent_histogram,
    lost_share,
    overflow_share,
    subnormal_share,
)

floats32 = hnp.arrays(
    np.float32, st.integers(1, 60), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)
powers = st.integers(-60, 60).map(lambda exponent: 2.0**exponent)


def count_of(histogram: ExponentHistogram, exponent: int) -> int:
    return int(histogram.counts[exponent - EXPONENTS[0]])


def test_each_magnitude_is_counted_in_the_bin_of_its_leading_bit() -> None:
    histogram = exponent_histogram(np.array([1.0, 1.999, -2.0, 0.5, 0.75], np.float32))
    assert count_of(histogram, 0) == 2
    assert count_of(histogram, 1) == 1
    assert count_of(histogram, -1) == 2
    assert histogram.nonzero == 5


def test_zeros_and_nonfinite_elements_are_counted_apart() -> None:
    histogram = exponent_histogram(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.float16))
    assert (int(histogram.zeros), int(histogram.nonfinite), histogram.nonzero) == (2, 3, 1)


def test_the_smallest_float32_is_in_the_first_bin_and_the_largest_in_the_last() -> None:
    histogram = exponent_histogram(np.array([FP32.smallest_subnormal, FP32.max], np.float32))
    assert histogram.counts[0] == 1
    assert histogram.counts[-1] == 1


def test_float64_beyond_float32_is_counted_in_the_end_bins() -> None:
    histogram = exponent_histogram(np.array([1e-300, 1e300], np.float64))
    assert histogram.counts[0] == 1
    assert histogram.counts[-1] == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e5m2])
def test_every_floating_type_gives_the_same_histogram_of_the_same_values(dtype: type) -> None:
    values = np.array([0.25, 3.0, -1.0, 0.0])
    np.testing.assert_array_equal(exponent_histogram(values.astype(dtype)).counts, exponent_histogram(values).counts)


def test_complex_arrays_count_their_real_and_imaginary_parts() -> None:
    histogram = exponent_histogram(np.array([1 + 4j], np.complex64))
    assert (count_of(histogram, 0), count_of(histogram, 2)) == (1, 1)


def test_a_histogram_of_several_arrays_is_the_sum_of_their_histograms() -> None:
    first, second = np.array([1.0, 0.0], np.float32), np.array([[2.0], [np.nan]], np.float16)
    together = exponent_histogram([first, second])
    assert together.to_dict() == (exponent_histogram(first) + exponent_histogram(second)).to_dict()


def test_large_strided_and_empty_arrays_are_counted_whole() -> None:
    strided = np.ones((300, 400), np.float32).T[::2]
    assert count_of(exponent_histogram([strided, np.empty((0, 3), np.float32)]), 0) == strided.size


def test_a_histogram_survives_json() -> None:
    histogram = exponent_histogram(np.array([1.0, 0.0, np.inf], np.float32))
    assert ExponentHistogram.from_dict(json.loads(json.dumps(histogram.to_dict()))).to_dict() == histogram.to_dict()


def test_a_histogram_with_another_number_of_bins_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`counts` must have one number for each of the 277 bins. Received: shape \(3,\)"
    ):
        ExponentHistogram(np.zeros(3, np.int64))


@pytest.mark.parametrize("format", [FP16, BF16, FP8_E4M3, FP8_E5M2])
@given(values=floats32, scale=powers)
def test_lost_share_is_what_rounding_to_the_format_loses(format: Format, values: np.ndarray, scale: float) -> None:
    product = values.astype(np.float64) * scale
    rounded = format.round(product)
    kept = product[product != 0]
    tie = np.abs(kept) == format.smallest_subnormal / 2  # the one magnitude that the histogram counts as kept
    lost = np.count_nonzero((rounded[product != 0] == 0) & ~tie)
    assert lost_share(exponent_histogram(values), format, scale) == pytest.approx(lost / max(1, kept.size), abs=1e-12)


def test_a_scale_between_powers_of_two_loses_part_of_a_bin() -> None:
    evenly = np.linspace(2.0**-25, 2.0**-24, 1000, endpoint=False, dtype=np.float32)
    assert lost_share(exponent_histogram(evenly), FP16, 0.75) == pytest.approx(1 / 3)


@pytest.mark.parametrize("format", [FP16, BF16, FP8_E4M3, FP8_E5M2])
@given(values=floats32, scale=powers)
def test_subnormal_share_is_what_the_format_keeps_with_fewer_digits(
    format: Format, values: np.ndarray, scale: float
) -> None:
    magnitudes = np.abs(values[values != 0].astype(np.float64) * scale)
    subnormal = np.count_nonzero((magnitudes >= format.smallest_subnormal / 2) & (magnitudes < format.smallest_normal))
    share = subnormal_share(exponent_histogram(values), format, scale)
    assert share == pytest.approx(subnormal / max(1, magnitudes.size), abs=1e-12)


def test_nothing_is_lost_of_an_array_of_zeros() -> None:
    assert lost_share(exponent_histogram(np.zeros(3)), FP16) == 0.0


def test_overflow_share_counts_what_the_format_cannot_hold() -> None:
    histogram = exponent_histogram(np.array([1.0, 2.0**15, 2.0**16, 2.0**20], np.float32))
    assert overflow_share(histogram, FP16) == pytest.approx(0.5 + 0.25 * (1 - 65520 / 2**15 + 1))
    assert overflow_share(histogram, FP16, scale=2.0**-6) == 0.0


@given(values=floats32, margin_bits=st.integers(0, 10))
def test_the_best_static_scale_is_the_largest_power_of_two_that_keeps_the_margin(
    values: np.ndarray, margin_bits: int
) -> None:
    peak = np.abs(values.astype(np.float64)).max()
    if not 2.0**-90 < peak < 2.0**90:
        return
    scale = best_static_scale(values, FP16, margin_bits)
    top = 2.0 ** (np.floor(np.log2(peak)) + 1)
    assert top * scale * 2**margin_bits <= FP16.max < top * scale * 2 * 2**margin_bits


def test_the_best_static_scale_loses_nothing_where_the_format_is_wide_enough() -> None:
    histogram = exponent_histogram(np.array([2e-8, 3e-5, 1e-2], np.float32))
    scale = best_static_scale(histogram)
    assert scale == 2.0**19
    assert lost_share(histogram, FP16) > 0
    assert lost_share(histogram, FP16, scale) == overflow_share(histogram, FP16, scale) == 0


def test_the_best_static_scale_stays_within_the_bounds_of_scales() -> None:
    assert best_static_scale(np.array([1e-300], np.float64)) == 2.0**126
    assert best_static_scale(np.array([1e300], np.float64), margin_bits=15) == 2.0**-126


def test_a_best_scale_of_zeros_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must hold an element that is not zero\. Received: none"):
        best_static_scale(np.zeros(4, np.float32))


def test_a_best_scale_of_nonfinite_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be finite.* Received: 2 elements that are inf or NaN"):
        best_static_scale(np.array([np.inf, np.nan, 1.0], np.float32))


def test_a_negative_margin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`margin_bits` must not be negative\. Received: margin_bits=-1"):
        best_static_scale(np.array([1.0], np.float32), margin_bits=-1)


def test_a_scale_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`scale` must lie between 2\*\*-126 and 2\*\*126"):
        lost_share(exponent_histogram(np.array([1.0], np.float32)), FP16, scale=0.0)
