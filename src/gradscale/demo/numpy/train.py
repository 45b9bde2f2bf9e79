"""The training loop: one way to train the model, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradscale.demo.digits import Digits
from gradscale.demo.numpy.adam import Adam
from gradscale.demo.numpy.model import Params, evaluate, init_params, run_pass
from gradscale.demo.numpy.precision import Array, Store, single
from gradscale.demo.run import SAMPLE_EVERY, Run
from gradscale.histogram import exponent_histogram
from gradscale.numpy import LossScaler
from gradscale.numpy.tree import named_arrays
from gradscale.policies.contract import Policy

LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        name: what the table and the plot call it.
        policy: the rule for the scale.
        store: how weights, activations and gradients are kept; master weights are always float32.
    """

    name: str
    policy: Policy
    store: Store


def train(way: Way, digits: Digits, seed: int, steps: int, tick: Callable[[], None]) -> Run:
    """Returns the run. The same seed gives every way the same start and the same batches.

    Args:
        way: how to train.
        digits: the data.
        seed: of the start and the batches.
        steps: how many.
        tick: called after each.
    """
    from threadpoolctl import threadpool_limits

    # Matrices this small are faster on one thread, and on a busy machine by far.
    with threadpool_limits(1, user_api="blas"):
        return _train(way, digits, np.random.default_rng(seed), steps, tick)


def _train(way: Way, digits: Digits, rng: np.random.Generator, steps: int, tick: Callable[[], None]) -> Run:
    params = init_params(rng)
    optimizer = Adam(params, LEARNING_RATE)
    scaler = LossScaler(way.policy)
    run = Run(way.name)
    for step in range(steps):
        images, labels = digits.batch(rng)
        made = run_pass(params, images, labels, scaler.loss_scale, way.store)
        if step % SAMPLE_EVERY == 0:
            _sample(run, step, params, images, labels, made.grads)
        result = scaler.step(made.grads, loss=made.loss)
        if result.applied:
            optimizer.update(result.grads)
        else:
            run.skipped.append(step)
        run.losses.append(made.classification)
        run.scales.append(result.scale)
        tick()
    run.scores = evaluate(params, digits.test_images, digits.test_labels)
    return run


def _sample(run: Run, step: int, params: Params, images: Array, labels: Array, grads: Params) -> None:
    """Compares the gradients with those that FP32 makes of the same weights and images."""
    true = run_pass(params, images, labels, 1.0, single)
    true_grads = [array for _, array in named_arrays(true.grads)]
    kept_grads = [array for _, array in named_arrays(grads)]
    nonzero = sum(int(np.count_nonzero(array)) for array in true_grads)
    lost = sum(
        int(np.count_nonzero((array != 0) & (kept == 0))) for array, kept in zip(true_grads, kept_grads, strict=True)
    )
    run.sampled.append(step)
    run.lost.append(lost / max(1, nonzero))
    run.histogram = run.histogram + exponent_histogram([*true_grads, *true.activation_grads])
