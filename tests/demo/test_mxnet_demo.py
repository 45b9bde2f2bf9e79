"""The demo in MXNet: its model, its runs, and the subcommand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.demo.four_recipes import RECIPES, check_command, check_same_start, check_static_scale, compared

from gradscale.demo import Run, load_demo

mx = pytest.importorskip("mxnet")

from gradscale.demo.mxnet.model import Autoencoder, losses_of  # noqa: E402

STEPS = 6


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return compared("mxnet", STEPS)


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


def test_the_four_recipes_are_run_in_order(runs: list[Run]) -> None:
    assert tuple(load_demo("mxnet").steps) == ("autoencoder",)
    assert tuple(run.recipe for run in runs) == RECIPES
    assert all(len(run.losses) == len(run.scales) == STEPS for run in runs)


def test_every_recipe_starts_from_the_same_weights_and_batches(runs: list[Run]) -> None:
    check_same_start(runs)


def test_the_static_scale_comes_from_the_gradients_of_the_fp32_run(runs: list[Run]) -> None:
    check_static_scale(runs)


def test_a_seed_gives_the_same_run_again_and_another_gives_another(runs: list[Run]) -> None:
    again, other = compared("mxnet", 1)[3], compared("mxnet", 1, seed=1)[3]
    assert (again.losses, again.lost) == (runs[3].losses[:1], runs[3].lost[:1])
    assert other.losses != again.losses


def test_the_histogram_holds_activations_too(runs: list[Run]) -> None:
    parameters = sum(grad.size for grad in gradients("float32", 1.0, hybrid=False))
    histogram = runs[0].histogram
    assert histogram.nonzero + int(histogram.zeros) > parameters


def test_only_unscaled_fp16_loses_gradients(runs: list[Run]) -> None:
    full, unscaled, static, dynamic = runs
    assert set(full.lost) == {0.0}
    assert min(unscaled.lost) > 0.4
    assert max(static.lost + dynamic.lost) < 0.01


@pytest.mark.parametrize("hybrid", [False, True])
def test_gradients_are_kept_in_float16_and_overflow_there(hybrid: bool) -> None:
    grads = gradients("float16", 2.0**24, hybrid=hybrid)
    assert {grad.dtype.name for grad in grads} == {"float16"}
    assert any(np.isinf(grad).any() for grad in grads)
    assert all(np.isfinite(grad).all() for grad in gradients("float32", 2.0**24, hybrid=hybrid))


def test_the_command_trains_and_writes_the_plot(tmp_path: Path) -> None:
    check_command("mxnet", "accuracy", tmp_path)


@pytest.mark.slow
def test_unscaled_fp16_fails_where_fp32_and_scaled_fp16_learn() -> None:
    full, unscaled, static, dynamic = compared("mxnet", load_demo("mxnet").steps["autoencoder"])
    assert full.scores["accuracy"] > 0.9
    assert unscaled.scores["accuracy"] < 0.2
    for scaled in (static, dynamic):
        assert scaled.scores["accuracy"] > full.scores["accuracy"] - 0.02
        assert np.mean(scaled.losses[-20:]) < 0.15
        assert np.mean(scaled.lost) < 0.05
    assert np.mean(unscaled.lost) > 0.5
    # Nothing but the classifier shows that something is wrong.
    assert unscaled.scores["pixel error"] < 2 * full.scores["pixel error"]
    assert len(dynamic.skipped) > 0
    assert len(static.skipped) == 0
