"""The training loop: one way to train the model, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

from gradscale.demo.digits import Digits
from gradscale.demo.mxnet.model import Autoencoder, losses_of, scores_of
from gradscale.demo.numpy.train import LEARNING_RATE
from gradscale.demo.run import SAMPLE_EVERY, Run
from gradscale.histogram import exponent_histogram
from gradscale.mxnet import init_trainer, scale_loss
from gradscale.policies.contract import Policy


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        name: what the table and the plot call it.
        policy: the rule for the scale.
        kept: the type of weights, activations and gradients; master weights are always float32.
    """

    name: str
    policy: Policy
    kept: str


def train(way: Way, digits: Digits, seed: int, steps: int, tick: Callable[[], None]) -> Run:
    """Returns the run. The same seed gives every way the same start and the same batches.

    Args:
        way: how to train.
        digits: the data.
        seed: of the start and the batches.
        steps: how many.
        tick: called after each.
    """
    rng = np.random.default_rng(seed)
    mx.random.seed(seed)
    model, twin = Autoencoder(way.kept), Autoencoder("float32")
    for one in (twin, model):
        one.initialize()
    _copy(twin, model)  # MXNet draws other numbers for float16
    model.hybridize()
    trainer = gluon.Trainer(model.collect_params(), "adam", {"learning_rate": LEARNING_RATE, "multi_precision": True})
    scaler = init_trainer(trainer, way.policy)
    run = Run(way.name)
    for step in range(steps):
        images, labels = map(nd.array, digits.batch(rng))
        with autograd.record():
            loss, shown = losses_of(model, images, labels)
            with scale_loss(loss, trainer) as scaled:
                scaled.backward()
        if step % SAMPLE_EVERY == 0:
            _sample(run, step, model, twin, images, labels)
        trainer.step(1)
        if scaler.last.skipped():
            run.skipped.append(step)
        run.losses.append(float(shown.asscalar()))
        run.scales.append(scaler.last.scale)
        tick()
    _copy(model, twin)
    run.scores = scores_of(twin, nd.array(digits.test_images), nd.array(digits.test_labels))
    return run


def _copy(source: Autoencoder, target: Autoencoder) -> None:
    """Gives the target the weights of the source, rounded to its type."""
    for given, taken in zip(_params(source), _params(target), strict=True):
        taken.set_data(given.data().astype(target.kept))


def _params(model: Autoencoder) -> list[Any]:
    return list(model.collect_params().values())


def _sample(run: Run, step: int, model: Autoencoder, twin: Autoencoder, images: Any, labels: Any) -> None:
    """Compares the gradients with those that FP32 makes of the same weights and images."""
    _copy(model, twin)
    taps: list[Any] = []
    with autograd.record():
        loss, _ = losses_of(twin, images, labels, taps)
    loss.backward()
    true_grads = [param.grad().asnumpy() for param in _params(twin)]
    kept_grads = [param.grad().asnumpy() for param in _params(model)]
    nonzero = sum(int(np.count_nonzero(array)) for array in true_grads)
    lost = sum(
        int(np.count_nonzero((array != 0) & (kept == 0))) for array, kept in zip(true_grads, kept_grads, strict=True)
    )
    run.sampled.append(step)
    run.lost.append(lost / max(1, nonzero))
    run.histogram = run.histogram + exponent_histogram([*true_grads, *(tap.grad.asnumpy() for tap in taps)])
