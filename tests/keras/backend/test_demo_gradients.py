"""The gradients that the demo looks at are those of its twin in numpy, on every backend."""

from typing import Any

import numpy as np
import pytest
from examples.demo.data import load_digits
from examples.demo.with_keras import Network, differentiated, init_weights, make_taps, targets
from examples.demo.with_numpy import init_params, run_pass, single

from gradscale.numpy.tree import named_arrays

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")  # the demo asks for both


@pytest.fixture(scope="module")
def batch() -> tuple[Any, Any]:
    return load_digits(seed=0).batch(np.random.default_rng(1))


def gradients(dtype: str, batch: tuple[Any, Any], scale: float, taps: Any = ()) -> list[Any]:
    network = Network(dtype, init_weights(np.random.default_rng(0)))
    return differentiated(network)(batch[0], taps, targets(*batch), scale)


def test_gradients_of_weights_and_activations_are_those_of_numpy(batch: tuple[Any, Any]) -> None:
    true = run_pass(init_params(np.random.default_rng(0)), *batch, 1.0, single)
    expected = [array for _, array in named_arrays(true.grads)]
    taken = gradients("float32", batch, 1.0, make_taps(len(batch[0])))
    assert len(taken) == len(expected) + len(make_taps(1))
    for own, other in zip(taken, expected, strict=False):
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-6 * np.abs(other).max())
    first_code = true.activation_grads[0]  # of the pixels, which the decoder's last layer puts out
    assert any(grad.shape == first_code.shape and np.allclose(grad, first_code, rtol=1e-3) for grad in taken)


def test_the_classifiers_gradients_are_zero_in_float16_without_a_scale(batch: tuple[Any, Any]) -> None:
    kernels = slice(8, None)  # encoder and decoder have two layers each, of two weights
    unscaled, scaled = (gradients("mixed_float16", batch, scale)[kernels] for scale in (1.0, 2.0**17))
    assert not any(grad.any() for grad in unscaled)
    assert all(grad.any() and np.isfinite(grad).all() for grad in scaled)
