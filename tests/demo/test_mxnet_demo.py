"""The demo in MXNet: its model, its runs, and the program."""

from typing import Any

import numpy as np
import pytest
from examples.demo import load_demo
from examples.demo.runs import Run
from tests.demo.five_recipes import FiveRecipes, compared

mx = pytest.importorskip("mxnet")

from examples.demo.with_mxnet import Autoencoder, losses_of  # noqa: E402


class TestMXNet(FiveRecipes):
    framework, model, score, lost = "mxnet", "autoencoder", "accuracy", 0.4
    steps = 6

    def test_the_histogram_holds_activations_too(self, runs: list[Run]) -> None:
        parameters = sum(grad.size for grad in gradients("float32", 1.0, hybrid=False))
        histogram = runs[0].histogram
        assert histogram.nonzero + int(histogram.zeros) > parameters


def gradients(dtype: str, scale: float, *, hybrid: bool) -> list[Any]:
    """Returns the gradients of a model whose weights are all equal, by an image of ones."""
    model = Autoencoder(dtype)
    model.initialize(mx.init.Constant(0.125), force_reinit=True)
    if hybrid:
        model.hybridize()
    images = mx.nd.ones((2, 64))
    with mx.autograd.record():
        loss, _ = losses_of(model, images, mx.nd.array([1, 2]))
        (loss * scale).backward()
    return [param.grad().asnumpy() for param in model.collect_params().values()]


@pytest.mark.parametrize("hybrid", [False, True])
def test_gradients_are_kept_in_float16_and_overflow_there(hybrid: bool) -> None:
    grads = gradients("float16", 2.0**24, hybrid=hybrid)
    assert {grad.dtype.name for grad in grads} == {"float16"}
    assert any(np.isinf(grad).any() for grad in grads)
    assert all(np.isfinite(grad).all() for grad in gradients("float32", 2.0**24, hybrid=hybrid))


@pytest.mark.slow
def test_unscaled_fp16_fails_where_fp32_and_scaled_fp16_learn() -> None:
    full, unscaled, static, headroom, dynamic = compared("mxnet", load_demo("mxnet").steps["autoencoder"])
    assert full.scores["accuracy"] > 0.9
    assert unscaled.scores["accuracy"] < 0.2
    for scaled in (static, headroom, dynamic):
        assert scaled.scores["accuracy"] > full.scores["accuracy"] - 0.02
        assert np.mean(scaled.losses[-20:]) < 0.15
        assert np.mean(scaled.lost) < 0.05
    assert np.mean(unscaled.lost) > 0.5
    # Nothing but the classifier shows that something is wrong.
    assert unscaled.scores["pixel error"] < 2 * full.scores["pixel error"]
    assert len(dynamic.skipped) > 10
    assert len(static.skipped) == len(headroom.skipped) == 0
