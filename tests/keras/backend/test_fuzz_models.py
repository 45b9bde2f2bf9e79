"""Random trainings of a model in `mixed_float16`, beside the same model in float32 without scaling.

The model is linear and all its numbers are small integers, so that its gradients are the same in both precisions.
"""

from pathlib import Path
from random import Random
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import BACKEND, same, weights
from tests.keras.backend.programs import EXACT

from gradscale import Dynamic, Headroom, Static
from gradscale.keras import LossScaleOptimizer

FEW = {"tensorflow": 6, "jax": 3, "torch": 10}[BACKEND]
MANY = {"tensorflow": 20, "jax": 10, "torch": 60}[BACKEND]
SIZE = 4


@keras.saving.register_keras_serializable(package="tests")
def linear_loss(targets: Any, outputs: Any) -> Any:
    """A loss whose gradient does not depend on the weights after the last layer."""
    return keras.ops.sum(targets * keras.ops.cast(outputs, "float32"), axis=-1)


def network(random: Random, dtype: str, frozen: bool, bias: bool) -> Any:
    """Returns a model of one or two linear layers. The first of two is frozen."""
    layers = [keras.layers.Input((3,))]
    if frozen:
        layers.append(keras.layers.Dense(2, use_bias=bias, trainable=False, dtype=dtype))
    model = keras.Sequential([*layers, keras.layers.Dense(2, use_bias=bias, dtype=dtype)])
    model.set_weights([_integers(random, weight.shape) for weight in model.weights])
    return model


def _integers(random: Random, shape: tuple[int, ...]) -> Any:
    return np.array([random.randint(-2, 2) for _ in range(int(np.prod(shape)))], "float32").reshape(shape)


def run(seed: int, folder: Path) -> None:
    """Trains both models; raises where they differ."""
    random = Random(seed)
    settings = {**EXACT[random.choice(list(EXACT))], "learning_rate": 2.0 ** -random.randint(1, 3)}
    settings |= random.choice(({}, {"clipvalue": 0.5}, {"gradient_accumulation_steps": 2}))
    growing = Dynamic(init_scale=8.0, growth_interval=2, max_scale=256.0)
    # Between these bounds no gradient of the model leaves the range of FP16.
    policy = random.choice((growing, Static(64.0), Headroom(init_scale=16.0, min_scale=1.0, max_scale=256.0)))
    shape = {"frozen": random.random() < 0.5, "bias": random.random() < 0.5}
    start = random.random()
    scaled = network(Random(start), "mixed_float16", **shape)
    plain = network(Random(start), "float32", **shape)
    options = {"loss": linear_loss, "run_eagerly": random.random() < 0.7, "jit_compile": False}
    scaled.compile(LossScaleOptimizer(keras.optimizers.SGD(**settings), policy=policy), **options)
    plain.compile(keras.optimizers.SGD(**settings), loss=linear_loss, run_eagerly=True)
    skipped = 0
    for step in range(random.randint(3, 5)):
        inputs, targets = _integers(random, (SIZE, 3)), _integers(random, (SIZE, 2))
        overflows = random.random() < 0.3
        if (
            step and random.random() < 0.3
        ):  # before the first step Keras saves no variables, and warns when it loads none
            scaled = _reloaded(scaled, folder / f"{step}.keras")
        if overflows:
            skipped += 1
            scaled.train_on_batch(inputs, np.full_like(targets, 3e38))
        else:
            scaled.train_on_batch(inputs, targets)
            plain.train_on_batch(inputs, targets)
        assert same(weights(scaled), weights(plain)), step
    assert scaled.optimizer.state.skipped == skipped


def _reloaded(model: Any, path: Path) -> Any:
    model.save(path)
    return keras.saving.load_model(path)


@pytest.mark.parametrize("seed", range(FEW))
def test_a_model_in_mixed_precision_trains_as_in_float32(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path)


@pytest.mark.slow
def test_many_models_in_mixed_precision_train_as_in_float32(tmp_path: Path) -> None:
    for seed in range(1000, 1000 + MANY):
        run(seed, tmp_path)
