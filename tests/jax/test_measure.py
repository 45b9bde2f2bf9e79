"""No inf and no NaN gets past the measure, in gradients of any size, type and place.

XLA has kernels of its own for large arrays, in which a NaN may be lost, so small arrays prove nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradscale import Dynamic, Policy
from gradscale.jax import Scaler, StepResult
from gradscale.kernels.jax import peak
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax

SHAPES = [(1,), (37,), (4096,), (3, 3, 16, 32), (97, 1031)]
TYPES = ["float16", "bfloat16", "float32", "complex64"]
ASKED: list[tuple[Policy, dict[str, Any]]] = [
    (Dynamic(), {}),
    (Dynamic(), {"clip_norm": 1.0}),
    (Headroom(), {}),
    (Headroom(), {"norm": True}),
    (LogMax(), {}),
    (Histogram(), {}),
]


def steps(policy: Policy, options: Any) -> Any:
    """Returns a compiled step, and the scaler to start with."""

    def step(scaler: Scaler, gradients: Any) -> StepResult:
        return scaler.step(gradients, **options)[2]

    return jax.jit(step), Scaler(policy)


def gradient(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, shape)
    if dtype == "complex64":
        values = values + 1j * rng.normal(0, 1, shape)
    return np.asarray(jnp.asarray(values, dtype)).copy()


def places(size: int) -> list[int]:
    """Returns positions at both ends and in between, where one kernel or another works on the rest of an array."""
    return sorted({0, size // 3, size // 2, size - 1})


@pytest.mark.parametrize(("policy", "options"), ASKED)
@pytest.mark.parametrize("dtype", TYPES)
def test_one_bad_number_skips_the_step_and_is_called_by_its_name(policy: Policy, options: Any, dtype: str) -> None:
    """And finite numbers do not, up to the largest."""
    step, scaler = steps(policy, options)
    fine = {str(shape): gradient(shape, dtype) for shape in SHAPES}
    large = gradient((4096,), dtype)
    large[99] = min(float(jnp.finfo(dtype).max), 1e18)  # whose square is still a float32
    assert not step(scaler, {**fine, "(4096,)": large}).skipped()
    for name, values in fine.items():
        for place in places(values.size):
            for bad, kind in ((np.nan, "nan"), (np.inf, "inf"), (-np.inf, "inf")):
                hurt = values.copy()
                hurt.flat[place] = complex(1, bad) if dtype == "complex64" else bad
                result = step(scaler, {**fine, name: hurt})
                assert result.skipped(), (name, place, bad)
                assert [(culprit.name, culprit.kind) for culprit in result.culprits()] == [(name, kind)]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_nan_beside_an_inf_is_a_nan(dtype: str) -> None:
    step, scaler = steps(Headroom(), {})
    values = gradient((4096,), dtype)
    values[7], values[4000] = np.inf, np.nan
    assert [culprit.kind for culprit in step(scaler, values).culprits()] == ["nan"]


def test_the_largest_magnitude_is_that_of_all_gradients() -> None:
    step, scaler = steps(Headroom(init_scale=4.0), {})
    values = gradient((97, 1031), "float32")
    values[50, 1000] = -123.0
    assert float(step(scaler, values).amax) == 123.0 / 4


def test_gradients_that_overflow_only_once_they_are_unscaled_are_skipped() -> None:
    step, scaler = steps(Dynamic(init_scale=2.0**-4, min_scale=2.0**-8), {})
    assert step(scaler, jnp.array([1e38, 0.0])).skipped()
    assert not step(scaler, jnp.array([1e37, 0.0])).skipped()


@pytest.mark.parametrize("shape", [(), (3, 0, 2), (7, 3, 5, 11, 13)])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_peak_is_that_of_numpy_in_any_shape(shape: tuple[int, ...], dtype: str) -> None:
    values: Any = gradient(shape, dtype)
    expected = max((abs(part).max(initial=0) for part in (values.real, values.imag)), default=0)
    assert float(jax.jit(peak)(values)) == float(expected)


def test_each_row_of_a_map_has_a_peak_of_its_own() -> None:
    rows = gradient((5000, 3), "complex64")
    rows[4000, 1], rows[4001, 2], rows[4002, 0] = np.nan, complex(0, -np.inf), 77
    peaks = np.asarray(jax.jit(jax.vmap(peak))(rows))
    assert np.isnan(peaks[4000])
    assert peaks[4001:4003].tolist() == [np.inf, 77.0]
    assert np.isfinite(np.delete(peaks, [4000, 4001])).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz"])
def test_a_peak_is_the_largest_magnitude_bit_exactly(dtype: str) -> None:
    values = jnp.asarray(gradient((97, 131), "float32"), dtype).at[3, 5].set(-6.0)
    assert float(peak(values)) == 6.0
    assert float(peak(jnp.zeros((0, 3), dtype))) == 0.0
    assert float(peak(-values * 0)) == 0.0
    assert np.isnan(peak(values.at[96, 130].set(jnp.nan)))


def test_a_peak_may_be_subnormal_or_the_largest_number() -> None:
    assert float(peak(jnp.array([2.0**-24, -(2.0**-23)], jnp.float16))) == 2.0**-23
    assert float(peak(jnp.array([-3.4028235e38, 1.0]))) == np.finfo(np.float32).max


def test_a_nan_is_above_inf_whatever_its_sign() -> None:
    for nan in (0x7FC00000, 0xFFC00000, 0x7F800001):
        values = np.array([np.inf, 0, -np.inf], np.float32)
        values.view(np.uint32)[1] = nan
        assert np.isnan(peak(jnp.asarray(values)))
