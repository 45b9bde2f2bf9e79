"""The training loop: one way to train the model, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np

from gradscale.demo.digits import Digits
from gradscale.demo.keras.model import LOSSES, WEIGHTS, Network, init_weights, targets
from gradscale.demo.keras.probe import Probe
from gradscale.demo.numpy.train import LEARNING_RATE
from gradscale.demo.run import SAMPLE_EVERY, Run
from gradscale.keras import LossScaleOptimizer
from gradscale.policies.contract import Policy

EPSILON = 1e-8
"""What Adam adds to the size of a gradient, as other frameworks have it. Keras' own 1e-7 would drown
the classifier's."""


@dataclass(frozen=True)
class Way:
    """A way to train. Weights are always float32.

    Attributes:
        name: what the table and the plot call it.
        policy: the rule for the scale, or `"auto"`.
        dtype: Keras' dtype policy of the layers.
    """

    name: str
    policy: Policy | Literal["auto"]
    dtype: str


def train(way: Way, digits: Digits, probe: Probe, seed: int, steps: int, tick: Callable[[], None]) -> Run:
    """Returns the run. The same seed gives every way the same start and the same batches.

    Args:
        way: how to train.
        digits: the data.
        probe: what looks at the gradients now and then.
        seed: of the start and the batches.
        steps: how many.
        tick: called after each.
    """
    rng = np.random.default_rng(seed)
    model: Any = Network(way.dtype, init_weights(rng))
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(LEARNING_RATE, epsilon=EPSILON), policy=way.policy)
    # JAX has to compile. For TensorFlow and torch it would take longer than the training of so small a model.
    model.compile(optimizer, LOSSES, loss_weights=WEIGHTS, jit_compile=keras.config.backend() == "jax")
    run = Run(way.name)
    for step in range(steps):
        images, labels = digits.batch(rng)
        before = optimizer.state
        if step % SAMPLE_EVERY == 0:
            probe.sample(run, step, way.dtype, model.get_weights(), targets(images, labels), float(before.scale))
        model.reset_metrics()
        losses = model.train_on_batch(images, targets(images, labels), return_dict=True)
        if optimizer.state.skipped > before.skipped:
            run.skipped.append(step)
        run.losses.append(float(losses["classifier_loss"]))
        run.scales.append(float(before.scale))
        tick()
    run.scores = probe.scores(model.get_weights(), digits)
    return run
