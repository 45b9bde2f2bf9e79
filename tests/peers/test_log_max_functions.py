"""The C library's logarithm and power, against results of TensorFlow 2.21 on a CPU.

The numbers are among the one in a thousand for which float64, rounded to float32, gives another last bit.
"""

import ctypes
import platform
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries round otherwise")
def test_logarithm_and_power_have_the_bits_of_tensorflow() -> None:
    for x, natural in LOGARITHMS:
        assert float(_log_max.log2(np.float32(x), np)) == float(np.float32(natural) * np.float32(1.4426950408889634))
    for x, power in POWERS:
        assert float(_log_max.exp2(np.float32(x), np)) == power


@pytest.mark.usefixtures("no_library")
def test_without_the_library_results_are_off_by_a_unit_in_the_last_place_at_most() -> None:
    for x, natural in LOGARITHMS:
        assert float(_log_max.log2(np.float32(x), np)) == pytest.approx(natural * 1.4426950408889634, rel=3e-7)
    for x, power in POWERS:
        assert float(_log_max.exp2(np.float32(x), np)) == pytest.approx(power, rel=1.2e-7)


def test_arrays_keep_their_shape_and_scalars_their_type() -> None:
    values = np.asarray([[1.0, 2.0], [4.0, 8.0]], np.float32)
    assert _log_max.exp2(values, np).tolist() == [[2.0, 4.0], [16.0, 256.0]]
    assert _log_max.exp2(np.float32(3.0), np).dtype == np.float32


def test_logarithm_of_zero_is_minus_infinity_without_a_warning() -> None:
    assert float(_log_max.log2(np.float32(0.0), np)) == -np.inf
