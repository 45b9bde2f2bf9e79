"""The demo's arithmetic: real float16, correct gradients, and Adam."""

from typing import Any

import numpy as np
import pytest
from examples.demo import with_numpy
from examples.demo.data import CLASSIFIER_WEIGHT
from examples.demo.with_numpy import Adam, Params, half, init_params, run_pass, single, wide
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradscale.numpy.tree import mapped, named_arrays

Array = np.ndarray[Any, Any]

floats = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32))


def every_half() -> Array:
    return np.arange(2**16, dtype=np.uint16).view(np.float16)


@given(values=floats)
def test_half_rounds_as_numpy_does(values: Array) -> None:
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half(values), values.astype(np.float16))


def test_half_rounds_every_tie_between_neighbours_as_numpy_does() -> None:
    positive = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (positive[:-1] + positive[1:]) / 2
    for values in (ties, -ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))):
        np.testing.assert_array_equal(half(values), values.astype(np.float16))


def test_half_keeps_every_float16_and_wide_returns_it() -> None:
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(wide(every_half()), every_half().astype(np.float32))
    finite = every_half()[np.isfinite(every_half())]
    np.testing.assert_array_equal(half(wide(finite)), finite)


def test_arrays_kept_in_float32_are_not_copied() -> None:
    values = np.ones(3, np.float32)
    assert single(values) is values
    assert wide(values) is values


@pytest.fixture
def batch() -> tuple[Params, Array, Array]:
    rng = np.random.default_rng(0)
    return init_params(rng), rng.uniform(size=(64, 64)).astype(np.float32), rng.integers(0, 10, 64)


def test_gradients_are_the_slope_of_the_loss(
    batch: tuple[Params, Array, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_numpy, "CLASSIFIER_WEIGHT", 1.0)  # so that both parts are seen
    params, images, labels = batch
    rng = np.random.default_rng(1)
    direction = mapped(params, lambda _, array: rng.standard_normal(array.shape).astype(np.float32))
    grads = run_pass(params, images, labels, 1.0, single).grads

    def loss_at(distance: float) -> float:
        moved = iter(array for _, array in named_arrays(direction))
        return run_pass(
            mapped(params, lambda _, array: array + distance * next(moved)), images, labels, 1.0, single
        ).loss

    step = 1e-3
    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    pairs = zip(named_arrays(grads), named_arrays(direction), strict=True)
    assert sum(float((grad * way).sum()) for (_, grad), (_, way) in pairs) == pytest.approx(slope, rel=1e-2)


def test_gradients_of_the_classifier_are_the_slope_of_its_own_loss(batch: tuple[Params, Array, Array]) -> None:
    params, images, labels = batch
    grad = run_pass(params, images, labels, 1.0, single).grads["classifier"][1]["weight"]
    weight = params["classifier"][1]["weight"]
    where = np.unravel_index(np.abs(grad).argmax(), grad.shape)
    losses: list[float] = []
    for change in (0.05, -0.1):
        weight[where] += change
        losses.append(run_pass(params, images, labels, 1.0, single).classification)
    assert grad[where] == pytest.approx(CLASSIFIER_WEIGHT * (losses[0] - losses[1]) / 0.1, rel=2e-2)


def test_a_scale_that_is_a_power_of_two_multiplies_every_gradient_exactly(batch: tuple[Params, Array, Array]) -> None:
    once, scaled = (run_pass(*batch, scale, single) for scale in (1.0, 2.0**20))
    for (name, small), (_, large) in zip(named_arrays(once.grads), named_arrays(scaled.grads), strict=True):
        np.testing.assert_array_equal(small * np.float32(2.0**20), large, err_msg=name)
    assert once.loss == scaled.loss


def test_everything_is_kept_in_float16(batch: tuple[Params, Array, Array]) -> None:
    made = run_pass(*batch, 1.0, half)
    assert {array.dtype for _, array in named_arrays(made.grads)} == {np.dtype(np.float16)}
    assert {array.dtype for array in made.activation_grads} == {np.dtype(np.float16)}


def test_unscaled_float16_has_no_gradient_for_the_classifier_and_a_scale_brings_it_back(
    batch: tuple[Params, Array, Array],
) -> None:
    def share_of_zeros(scale: float) -> float:
        grads = named_arrays(run_pass(*batch, scale, half).grads["classifier"])
        return float(np.mean([np.mean(array == 0) for _, array in grads]))

    assert share_of_zeros(1.0) == 1.0
    assert share_of_zeros(2.0**18) < 0.5  # what is left is zero in FP32, too: rectified


def test_activations_that_overflow_make_a_loss_that_is_not_finite(batch: tuple[Params, Array, Array]) -> None:
    params, images, labels = batch
    params["classifier"][0]["weight"] *= np.float32(1e9)
    assert not np.isfinite(run_pass(params, images, labels, 1.0, half).loss)


def test_the_first_step_of_adam_goes_the_learning_rate_against_the_gradient() -> None:
    params = {"weight": np.zeros(2, np.float32)}
    Adam(params, lr=0.5).update({"weight": np.array([4.0, -0.25], np.float32)})
    assert params["weight"] == pytest.approx([-0.5, 0.5], rel=1e-5)


def test_adam_follows_its_formula() -> None:
    params = {"weight": np.zeros(1, np.float32)}
    optimizer = Adam(params, lr=0.1)
    mean = square = weight = 0.0
    for step, grad in enumerate((1.0, -3.0, 0.5, 1e-9), start=1):
        optimizer.update({"weight": np.array([grad], np.float32)})
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad**2
        weight -= 0.1 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)) ** 0.5 + 1e-8)
        assert params["weight"][0] == pytest.approx(weight, rel=1e-4)
