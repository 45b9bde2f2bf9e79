"""Formats: their constants, their rounding against exact arithmetic, and how they are looked up."""

import copy
import math
import pickle
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradscale import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, Format
from gradscale.formats import FORMATS, FP4_E2M1, TF32, get_format

# name: max, smallest normal, smallest subnormal, binades, bits, mantissa bits, has inf, has NaN, overflow threshold
CONSTANTS = {
    "FP32": (3.4028234663852886e38, 2.0**-126, 2.0**-149, 277, 32, 23, True, True, 2.0**128 - 2.0**103),
    "TF32": (3.4011621342146535e38, 2.0**-126, 2.0**-136, 264, 19, 10, True, True, 2.0**128 - 2.0**116),
    "BF16": (3.3895313892515355e38, 2.0**-126, 2.0**-133, 261, 16, 7, True, True, 2.0**128 - 2.0**119),
    "FP16": (65504.0, 2.0**-14, 2.0**-24, 40, 16, 10, True, True, 65520.0),
    "FP8_E4M3": (448.0, 2.0**-6, 2.0**-9, 18, 8, 3, False, True, math.nextafter(464.0, math.inf)),
    "FP8_E5M2": (57344.0, 2.0**-14, 2.0**-16, 32, 8, 2, True, True, 61440.0),
    "FP4_E2M1": (6.0, 1.0, 0.5, 4, 4, 1, False, False, 7.0),
}
STORED = [known for known in FORMATS if known is not TF32]


def nearest(value: float, known: Format) -> float:
    """Returns `value` in `known`, worked out in exact fractions: nearest, ties to even."""
    if not math.isfinite(value) or value == 0:
        past = value if known.has_inf or not math.isinf(value) else overflowed(value, known)
        return past
    lowest = math.frexp(known.smallest_normal)[1]
    quantum = Fraction(2) ** (max(math.frexp(value)[1], lowest) - 1 - known.mantissa_bits)
    rounded = round(Fraction(value) / quantum) * quantum
    return math.copysign(float(rounded), value) if abs(rounded) <= known.max else overflowed(value, known)


def overflowed(value: float, known: Format) -> float:
    if known.has_inf:
        return math.copysign(math.inf, value)
    return math.nan if known.has_nan else math.copysign(known.max, value)


@st.composite
def near_ties(draw: st.DrawFn, known: Format) -> float:
    """Returns a number at, or a hair beside, the middle between two values of the format."""
    exponent = draw(st.integers(math.frexp(known.smallest_subnormal)[1] - 2, math.frexp(known.max)[1]))
    steps = draw(st.integers(0, 2 ** (known.mantissa_bits + 2)))
    middle = math.ldexp(1 + steps * 2.0 ** -(known.mantissa_bits + 2), min(exponent, 1020))
    toward = draw(st.sampled_from([middle, 0.0, math.inf]))
    return draw(st.sampled_from([1, -1])) * math.nextafter(middle, toward)


def test_every_format_is_listed_once_from_the_widest_to_the_narrowest() -> None:
    assert [known.name for known in FORMATS] == list(CONSTANTS)
    assert [known.bits for known in FORMATS] == [32, 19, 16, 16, 8, 8, 4]


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_constants_are_those_of_the_standard(known: Format) -> None:
    expected = CONSTANTS[known.name]
    read = (
        known.max,
        known.smallest_normal,
        known.smallest_subnormal,
        known.binades,
        known.bits,
        known.mantissa_bits,
        known.has_inf,
        known.has_nan,
        known.overflow_threshold,
    )
    assert read == expected


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
@given(data=st.data())
def test_rounding_float64_is_the_nearest_value_by_exact_arithmetic(known: Format, data: st.DataObject) -> None:
    value = data.draw(st.floats(allow_nan=False) | near_ties(known))
    rounded = known.round(np.array([value]))
    assert rounded.dtype == np.float64
    np.testing.assert_array_equal(rounded, [nearest(value, known)])
    assert math.isnan(rounded[0]) or np.signbit(rounded[0]) == np.signbit(value)


@pytest.mark.parametrize("known", STORED, ids=lambda known: known.name)
@given(values=st.lists(st.floats(width=32, allow_nan=False), max_size=20))
def test_rounding_float32_is_the_cast_of_the_formats_own_type(known: Format, values: list[float]) -> None:
    array = np.array(values, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(np.dtype(known.dtype_name)).astype(np.float32)
    np.testing.assert_array_equal(known.round(array), cast)


@given(st.floats())
@example(65520.0)
@example(1 + 2.0**-11 + 2.0**-60)
def test_fp16_rounding_is_numpys_own_cast_from_float64(value: float) -> None:
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(FP16.round(np.float64(value)), np.float16(value).astype(np.float64))


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_the_overflow_threshold_is_the_first_float64_that_is_not_rounded_to_max(known: Format) -> None:
    threshold = known.overflow_threshold
    assert nearest(math.nextafter(threshold, 0), known) == known.max
    assert known.round(np.float64(math.nextafter(threshold, 0))) == known.max
    past = overflowed(threshold, known)
    np.testing.assert_array_equal(known.round(np.array([threshold, -threshold])), [past, math.copysign(past, -1)])


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_rounding_twice_changes_nothing(known: Format) -> None:
    once = known.round(np.random.default_rng(0).normal(size=200) * known.max / 4)
    np.testing.assert_array_equal(known.round(once), once)


def test_rounding_to_a_narrow_format_goes_straight_there_not_through_float32() -> None:
    just_above_a_tie = np.array([1 + 2.0**-11 + 2.0**-40])
    assert TF32.round(just_above_a_tie).tolist() == [1 + 2.0**-10]
    assert FP16.round(just_above_a_tie).tolist() == [1 + 2.0**-10]
    assert BF16.round(np.array([1 + 2.0**-8 + 2.0**-40])).tolist() == [1 + 2.0**-7]
    assert FP8_E4M3.round(np.array([-1 - 2.0**-4 - 2.0**-40])).tolist() == [-1 - 2.0**-3]


@pytest.mark.parametrize("known", [known for known in FORMATS if known.has_nan], ids=lambda known: known.name)
@pytest.mark.parametrize("payload", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_nan_stays_nan_whatever_its_bits(known: Format, payload: int) -> None:
    nan = np.array([payload], np.uint32).view(np.float32)
    assert np.isnan(known.round(nan)).all()
    assert np.isnan(known.round(np.array([np.nan, -np.nan]))).all()


def test_overflow_becomes_inf_nan_or_the_maximum() -> None:
    assert FP8_E5M2.round([1e6]).tolist() == [math.inf]
    assert math.isnan(FP8_E4M3.round([1e6])[0])
    assert FP4_E2M1.round([1e6, -math.inf]).tolist() == [6.0, -6.0]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1 / 3, np.float32),
        ([1 / 3], np.float32),
        ((1 / 3,), np.float32),
        (1, np.float32),
        (np.float32(1), np.float32),
        (np.float64(1), np.float64),
        (np.ones((2, 3)), np.float64),
        (np.ones((2, 3), np.float32), np.float32),
        (np.ones((2, 3), np.float16), np.float32),
        (np.ones(3, np.int64), np.float32),
        (np.ones(3, ml_dtypes.bfloat16), np.float32),
        (np.ones((0, 4)), np.float64),
    ],
)
@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_rounding_keeps_the_shape_and_gives_float64_only_for_float64(known: Format, value: Any, dtype: Any) -> None:
    rounded = known.round(value)
    assert (rounded.dtype, rounded.shape) == (dtype, np.shape(value))


def test_rounding_integers_rounds_once() -> None:
    past_float32 = 2**24 + 2**13 + 1
    assert TF32.round(np.array([past_float32])).tolist() == [2.0**24 + 2**14]


def test_rounding_does_not_change_its_input() -> None:
    values = np.array([1 / 3, 1e6])
    for known in FORMATS:
        known.round(values)
    assert values.tolist() == [1 / 3, 1e6]


@pytest.mark.parametrize("copied", [copy.deepcopy(TF32), pickle.loads(pickle.dumps(TF32))])
def test_a_copy_of_a_format_rounds_as_the_format(copied: Format) -> None:
    assert copied == TF32
    assert copied.round([1 / 3]).tolist() == TF32.round([1 / 3]).tolist() != [float(np.float32(1 / 3))]


@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ("fp16", FP16),
        ("FP16", FP16),
        ("half", FP16),
        ("float16", FP16),
        ("f16", FP16),
        ("torch.float16", FP16),
        ("bf16", BF16),
        ("bfloat16", BF16),
        ("float", FP32),
        ("f32", FP32),
        ("tf32", TF32),
        ("e4m3", FP8_E4M3),
        ("float8_e4m3fn", FP8_E4M3),
        ("e5m2", FP8_E5M2),
        ("e2m1", FP4_E2M1),
        ("float4_e2m1fn_x2", FP4_E2M1),
        (np.float16, FP16),
        (np.dtype("float16"), FP16),
        (np.dtype("float32"), FP32),
        (ml_dtypes.bfloat16, BF16),
        (np.dtype(ml_dtypes.float8_e5m2), FP8_E5M2),
        (FP8_E4M3, FP8_E4M3),
    ],
)
def test_a_format_is_found_by_name_and_by_numpy_dtype(spec: Any, known: Format) -> None:
    assert get_format(spec) is known


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_every_format_is_found_by_its_own_name(known: Format) -> None:
    assert get_format(known.name) is known
    assert get_format(known.name.lower()) is known


def test_a_format_is_found_by_torch_dtype() -> None:
    torch = pytest.importorskip("torch")
    assert get_format(torch.float16) is get_format(torch.half) is FP16
    assert get_format(torch.bfloat16) is BF16
    assert get_format(torch.float32) is FP32
    assert get_format(torch.float8_e4m3fn) is FP8_E4M3
    assert get_format(torch.float8_e5m2) is FP8_E5M2


def test_a_format_is_found_by_a_scalar_type_as_jax_has_them() -> None:
    class ScalarMeta(type):
        dtype = np.dtype("float16")

    assert get_format(ScalarMeta("float16", (), {})) is FP16


def test_a_format_is_found_by_a_dtype_object_with_a_name_as_tensorflow_has_them() -> None:
    class DType:
        name = "bfloat16"

    assert get_format(DType()) is BF16


@pytest.mark.parametrize("spec", ["float77", "", "int8", None, 16, np.dtype("int32"), np.float64, object()])
def test_an_unknown_format_is_refused_with_the_names_that_are_known(spec: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"There is no format .*\. Received: .*Known names: .*bfloat16.*tf32",
    ):
        get_format(spec)
