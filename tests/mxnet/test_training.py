"""Small networks in FP16 with float32 masters: they overflow in earnest, recover, and learn what FP32 learns."""

from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
import pytest
from examples.demo.with_mxnet import KeptDense
from mxnet import autograd, gluon, nd
from tests.mxnet.helpers import ONE, TWO

from gradscale import Dynamic, NoScaling, Policy
from gradscale.mxnet import init_trainer, scale_loss

STEPS = 40
TOO_HIGH = Dynamic(init_scale=2.0**24, growth_interval=10)
MODES = {"imperative": None, "hybrid": {}, "static": {"static_alloc": True, "static_shape": True}}


class Trained(NamedTuple):
    """The result of a run. Of every parameter, `weights` has the values on each context."""

    losses: list[float]
    skips: list[bool]
    weights: list[list[Any]]


def train(kept: str, policy: Policy | None, mode: dict[str, bool] | None, contexts: Any = ONE) -> Trained:
    """Trains a network to tell which of two numbers is larger, on one batch, split over the contexts."""
    mx.random.seed(0)
    net = gluon.nn.HybridSequential()
    net.add(KeptDense(2, 16, kept, rectified=True), KeptDense(16, 1, kept, rectified=False))
    net.initialize(mx.init.Constant(0.0), ctx=list(contexts))
    rng = np.random.default_rng(0)
    for param in net.collect_params().values():
        param.set_data(nd.array(rng.uniform(-1, 1, param.shape), dtype=kept))
    if mode is not None:
        net.hybridize(**mode)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05, "multi_precision": True})
    scaler = init_trainer(trainer, policy, clip_norm=1.0)
    x = rng.normal(size=(32, 2))
    xs, ys = (gluon.utils.split_and_load(nd.array(one), list(contexts)) for one in (x, x[:, :1] > x[:, 1:]))
    criterion = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    losses, skips = [], []
    for _ in range(STEPS):
        with autograd.record():
            found = [criterion(net(x.astype(kept)).astype("float32"), y) for x, y in zip(xs, ys, strict=True)]
            with scale_loss(found, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(len(x))
        losses.append(float(np.mean([loss.mean().asscalar() for loss in found])))
        skips.append(scaler.last.skipped())
    return Trained(losses, skips, [[data.asnumpy() for data in param.list_data()] for param in trainer._params])


@pytest.fixture(scope="module")
def full() -> Trained:
    return train("float32", NoScaling(), None)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("contexts", [ONE, TWO], ids=["one context", "two contexts"])
def test_fp16_recovers_from_overflow_and_learns_what_fp32_learns(full: Trained, mode: Any, contexts: Any) -> None:
    half = train("float16", TOO_HIGH, mode, contexts)
    assert half.skips[0]
    assert 0 < sum(half.skips) < STEPS / 2
    for copies in half.weights:
        assert copies[0].dtype == np.float16
        assert np.isfinite(copies[0]).all()
        assert all((copy == copies[0]).all() for copy in copies)
    applied = STEPS - sum(half.skips)
    assert half.losses[-1] == pytest.approx(full.losses[applied - 1], rel=0.02)
    assert half.losses[-1] < 0.7 * half.losses[0]


def test_hybridized_and_not_take_the_same_steps() -> None:
    plain, hybrid = (train("float16", TOO_HIGH, MODES[mode]) for mode in ("imperative", "hybrid"))
    assert (plain.losses, plain.skips) == (hybrid.losses, hybrid.skips)
