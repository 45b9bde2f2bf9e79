"""Exponent histograms, what a format and a scale lose of them, and the best static scale."""

import json
import math
from itertools import pairwise

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
    block_histogram,
    exponent_histogram,
    losses,
    lost_share,
    overflow_share,
    safe_bits,
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


def test_zeros_infs_and_nans_are_counted_apart() -> None:
    histogram = exponent_histogram(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.float16))
    assert (int(histogram.zeros), int(histogram.infs), int(histogram.nans), histogram.nonzero) == (2, 2, 1, 1)
    assert histogram.nonfinite == 3


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


def test_the_lowest_and_the_highest_bin_are_those_that_hold_elements() -> None:
    histogram = exponent_histogram(np.array([3.0, 1e-3, 0.0], np.float32))
    assert (histogram.lowest, histogram.highest) == (-10, 1)


@pytest.mark.parametrize("shape", [(7, 100), (3, 5, 33), (2, 20_000), (5, 0), (0, 5), (), (3,)])
@pytest.mark.parametrize("block", [16, 32, 7])
def test_each_block_along_the_last_dimension_is_counted_by_its_largest_magnitude(
    shape: tuple[int, ...], block: int
) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    rows = values.reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)
    cut = [row[start : start + block] for row in rows for start in range(0, rows.shape[1], block)]
    peaks = np.array([np.abs(piece).max() for piece in cut], np.float32)
    assert block_histogram(values, block).to_dict() == exponent_histogram(peaks).to_dict()


def test_blocks_of_zeros_and_blocks_with_inf_or_nan_are_counted_apart() -> None:
    blocks = np.array([[0, 0], [1, np.inf], [np.nan, np.inf], [0, -4]], np.float32)
    histogram = block_histogram(blocks, 2)
    assert (int(histogram.zeros), int(histogram.infs), int(histogram.nans), histogram.nonzero) == (1, 1, 1, 1)


@pytest.mark.parametrize("block", [0, -1, 2.0])
def test_a_block_that_is_no_number_of_elements_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=r"`block` must be a positive number of elements\. Received: block="):
        block_histogram(np.ones(3), block)


def uniform_in_bins(exponents: range, each: int = 2000) -> np.ndarray:
    """Returns numbers that are uniformly distributed within each power of two, as `losses` assumes."""
    within = np.linspace(1, 2, each, endpoint=False) + 0.5 / each
    return np.concatenate([within * 2.0**exponent for exponent in exponents])


def energy(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


@pytest.mark.parametrize("scale", [1.0, 2.0**-4, 24.0])
@pytest.mark.parametrize("format", [FP16, FP8_E4M3, FP8_E5M2])
def test_shares_of_energy_are_those_of_the_elements_themselves(format: Format, scale: float) -> None:
    values = uniform_in_bins(range(-20, 18))
    magnitudes = values * scale
    found = losses(exponent_histogram(values), format, scale)
    edges = [0, format.smallest_subnormal / 2, format.smallest_normal, format.overflow_threshold, np.inf]
    flushed, subnormal, _, overflow = (
        energy(values[(magnitudes >= low) & (magnitudes < high)]) / energy(values) for low, high in pairwise(edges)
    )
    assert found.flushed_energy == pytest.approx(flushed, rel=2e-3)
    assert found.subnormal_energy == pytest.approx(subnormal, rel=2e-3)
    assert found.overflow_energy == pytest.approx(overflow, rel=2e-3)


@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 2.0**9, 1.5])
@pytest.mark.parametrize("format", [FP16, BF16, FP8_E4M3, FP8_E5M2])
def test_the_signal_to_noise_ratio_is_that_of_rounding_and_clipping(format: Format, scale: float) -> None:
    values = uniform_in_bins(range(-20, 12))
    rounded = np.minimum(format.round(np.minimum(values * scale, format.max)), format.max) / scale
    ratio = 10 * np.log10(energy(values) / energy(values - rounded))
    assert losses(exponent_histogram(values), format, scale).snr_db == pytest.approx(ratio, abs=0.1)


def test_nothing_is_lost_of_a_histogram_of_zeros() -> None:
    found = losses(exponent_histogram(np.zeros(4)))
    assert (found.flushed, found.flushed_energy, found.snr_db) == (0, 0, np.inf)


@given(values=floats32, scale=powers)
def test_the_three_shares_are_shares(values: np.ndarray, scale: float) -> None:
    found = losses(exponent_histogram(values), FP8_E4M3, scale)
    for kind in ("", "_energy"):
        parts = [getattr(found, f"{name}{kind}") for name in ("flushed", "subnormal", "overflow")]
        assert all(0 <= part <= 1 for part in parts)
        assert sum(parts) <= 1 + 1e-9


def test_the_safe_bits_are_the_margin_of_the_best_scale() -> None:
    histogram = exponent_histogram(np.array([0.3, 1e-5], np.float32))
    assert safe_bits(histogram, FP16, best_static_scale(histogram, FP16, margin_bits=5)) == 5
    assert safe_bits(histogram, FP16, 2.0**18) == -2
