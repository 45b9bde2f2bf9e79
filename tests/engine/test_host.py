"""Tests of decisions in host memory: compiled, they have the bits of the same functions on arrays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale.engine.decide import unscale_and_clip
from gradscale.engine.host import estimate_on_host, factor_on_host, ratio_on_host, seeing, vector
from gradscale.engine.measurement import Measurement, with_amax
from gradscale.policies.contract import Seen

SIZES = st.floats(width=32).map(lambda size: np.float32(abs(size)))
SCALES = st.integers(-126, 126).map(lambda power: np.float32(2.0**power))
FLAGS = st.booleans().map(np.bool_)


def bits(*values: Any) -> list[Any]:
    """Returns numbers, or the numbers of records, so that they can be compared: NaN equals NaN."""
    found: list[Any] = []
    for value in values:
        each = [getattr(value, name) for name in Seen.__slots__] if isinstance(value, Seen) else [value]
        found += [np.ravel(number).view(np.uint8).tolist() for number in each]
    return found


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize(
    "read", [(), ("amax",), ("norm",), ("amax", "norm", "upper_share", "half_amax", "single_total")]
)
@given(data=st.data())
def test_what_was_seen_is_that_of_arrays(read: tuple[str, ...], wide: type, data: st.DataObject) -> None:
    sizes = {name: data.draw(SIZES, name) for name in read}
    measurement = Measurement(None, wide(data.draw(SIZES, "total")), **sizes)
    operands = data.draw(SCALES), data.draw(FLAGS), data.draw(FLAGS)
    divisor, loss_finite, overflowed = map(vector, operands)
    with np.errstate(all="ignore"):
        expected = vector(measurement).seen(divisor, loss_finite, np, overflowed)
        found = seeing(tuple(map(type, measurement)))(measurement, *operands)
    assert bits(found) == bits(expected)


@given(divisor=SCALES, norm=SIZES, clip=SIZES)
def test_the_factor_is_that_of_arrays(divisor: np.float32, norm: np.float32, clip: np.float32) -> None:
    with np.errstate(all="ignore"):
        expected = unscale_and_clip(vector(divisor), vector(norm), vector(clip), np)
        assert bits(factor_on_host(divisor, norm, clip)) == bits(expected)


@given(amax=SIZES, norm=SIZES, ratio=SIZES)
def test_the_estimate_of_the_largest_magnitude_is_that_of_arrays(
    amax: np.float32, norm: np.float32, ratio: np.float32
) -> None:
    seen = Seen(amax=amax, norm=norm)
    with np.errstate(all="ignore"):
        expected = with_amax(vector(seen), vector(ratio), np, measured=False)[0]
        assert bits(estimate_on_host(seen, ratio)) == bits(expected)
        expected_ratio = with_amax(vector(seen), vector(ratio), np, measured=True)[1]
        assert bits(ratio_on_host(seen, ratio)) == bits(expected_ratio)
