"""The operations that rules are made of."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale.policies.arithmetic import (
    Namespace,
    bounded,
    exp2_linear,
    larger,
    log2_linear,
    pow2_floor,
    root,
    smaller,
    two_to,
)
from gradscale.policies.scalars import SCALARS


@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_pow2_floor_is_the_power_of_two_at_or_below(x: float) -> None:
    assert pow2_floor(np.float32(x), np) == 2.0 ** (math.frexp(x)[1] - 1)


def test_pow2_floor_is_exact_at_every_power_of_two_and_at_its_neighbours() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-126, 127))
    assert (pow2_floor(powers, np) == powers).all()
    assert (pow2_floor(np.nextafter(powers, np.float32(np.inf)), np) == powers).all()
    assert (pow2_floor(np.nextafter(powers[1:], np.float32(0)), np) == powers[:-1]).all()


@pytest.mark.parametrize("x", [0.0, 1e-45, 2.0**-127])
def test_pow2_floor_stops_at_the_smallest_normal_number(x: float) -> None:
    assert pow2_floor(np.float32(x), np) == 2.0**-126


def test_pow2_floor_reaches_its_upper_end_without_overflow() -> None:
    assert pow2_floor(np.nextafter(np.float32(2.0**127), np.float32(0)), np) == 2.0**126


@given(st.floats(width=32))
def test_pow2_floor_of_scalars_is_that_of_arrays(x: float) -> None:
    namespaces: list[Namespace] = [np, SCALARS]
    with np.errstate(all="ignore"):
        expected, found = (pow2_floor(np.float32(x), xp) for xp in namespaces)
    assert np.array_equal(found, expected, equal_nan=True)
    assert type(found) is np.float32


def test_larger_and_smaller_pass_over_a_nan_that_comes_first() -> None:
    nan = np.float32(math.nan)
    assert (larger(nan, 1.0, np), smaller(nan, 1.0, np)) == (1.0, 1.0)


@pytest.mark.parametrize(("x", "kept"), [(0.5, 1.0), (1.5, 1.5), (3.0, 2.0), (math.inf, 2.0), (-math.inf, 1.0)])
def test_bounded_keeps_a_value_between_its_bounds(x: float, kept: float) -> None:
    assert bounded(np.float32(x), 1.0, 2.0, np) == kept


@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_the_logarithm_is_close_never_above_and_undone_by_the_power(x: float) -> None:
    log = log2_linear(np.float32(x), np)
    assert math.log2(x) - 0.0861 <= log <= math.log2(x) + 1e-5
    assert exp2_linear(log, np) == pytest.approx(x, rel=1e-5)


@given(st.integers(-126, 126))
def test_the_logarithm_is_exact_at_powers_of_two(exponent: int) -> None:
    assert log2_linear(np.float32(2.0**exponent), np) == exponent
    assert exp2_linear(np.float32(exponent), np) == 2.0**exponent


@given(st.floats(0, 60000))
def test_the_root_is_close_and_never_too_small(x: float) -> None:
    found = root(np.float32(x))
    assert found >= math.sqrt(np.float32(x)) * (1 - 1e-6)
    if 0.0005 <= x <= 2000:
        assert found <= math.sqrt(x) * 1.01


@pytest.mark.parametrize("bits", range(16))
def test_two_to_is_exact_for_whole_bits(bits: int) -> None:
    assert two_to(float(bits), np) == 2.0**bits
    assert two_to(np.array([bits], np.float32), np).tolist() == [2.0**bits]
