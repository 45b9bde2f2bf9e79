"""The C library's logarithm and power, against results of TensorFlow 2.21 on a CPU.

The numbers are among the one in a thousand for which float64, rounded to float32, gives another last bit. So do other
versions of the C library, and the same version on CPUs with and without fused multiply-add. So results are held to the
error of the functions, less than one unit in the last place, on either side.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradscale.peers import _log_max

LOGARITHMS = [(0.48954659700393677, -0.714275598526001), (132.74783325195312, 4.888451099395752)]
POWERS = [(-1.334993839263916, 0.3963937759399414), (13.69866943359375, 13295.67578125)]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(name: Any) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    _log_max._c_function.cache_clear()
    yield
    _log_max._c_function.cache_clear()


def assert_near_tensorflow() -> None:
    for x, natural in LOGARITHMS:
        # One unit for the logarithm, and half of one for each of the two products with the constant.
        wanted = np.float32(natural) * np.float32(_log_max.LOG2_E)
        assert abs(_log_max.log2(np.float32(x), np) - wanted) <= 2 * np.spacing(abs(wanted))
    for x, power in POWERS:
        assert abs(_log_max.exp2(np.float32(x), np) - np.float32(power)) <= np.spacing(np.float32(power))


def test_logarithm_and_power_are_those_of_tensorflow_within_the_error_of_both() -> None:
    assert_near_tensorflow()


@pytest.mark.usefixtures("no_library")
def test_without_the_library_results_are_as_near() -> None:
    assert_near_tensorflow()


def test_arrays_keep_their_shape_and_scalars_their_type() -> None:
    values = np.asarray([[1.0, 2.0], [4.0, 8.0]], np.float32)
    assert _log_max.exp2(values, np).tolist() == [[2.0, 4.0], [16.0, 256.0]]
    assert _log_max.exp2(np.float32(3.0), np).dtype == np.float32


def test_logarithm_of_zero_is_minus_infinity_without_a_warning() -> None:
    assert float(_log_max.log2(np.float32(0.0), np)) == -np.inf
