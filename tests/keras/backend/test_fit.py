"""`fit` in every mode: the same weights and scales as Keras's own class, and an overflow that changes nothing."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import (
    BACKEND,
    LARGE,
    data,
    host,
    inner_state,
    network,
    same,
    trained,
    weights,
    without,
)

from gradscale import Dynamic, Headroom, NoScaling, Static
from gradscale.keras import LossScaleOptimizer

KerasOwn = keras.optimizers.LossScaleOptimizer
SGD: Any = keras.optimizers.SGD
Adam = keras.optimizers.Adam

# Compiling with torch takes half a minute, and what it imports warns of torch's own past.
SLOW = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")] if BACKEND == "torch" else []
MODES = [{"run_eagerly": True}, {"jit_compile": False}, pytest.param({"jit_compile": True}, marks=SLOW)]

INNER = {
    "adam": lambda: Adam(0.01),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: SGD(0.125, clipnorm=0.01),
    "clipvalue": lambda: SGD(0.125, clipvalue=0.01),
    "global_clipnorm": lambda: SGD(0.125, global_clipnorm=0.01),
    "moving averages": lambda: SGD(0.125, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: SGD(0.125, gradient_accumulation_steps=2),
    "schedule": lambda: SGD(keras.optimizers.schedules.ExponentialDecay(0.125, 2, 0.5)),
}


def scales(optimizer: Any) -> tuple[float, int]:
    return float(host(optimizer.dynamic_scale)), int(host(optimizer.step_counter))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_weights_and_scales_are_those_of_keras_own_class(mode: Any) -> None:
    ours = trained(LossScaleOptimizer(SGD(0.125), 1024.0, 2), data(1), **mode)
    theirs = trained(KerasOwn(SGD(0.125), 1024.0, 2), data(1), **mode)
    assert same(weights(ours), weights(theirs))
    assert scales(ours.optimizer) == scales(theirs.optimizer) == (1024.0, 0)
    assert (ours.optimizer.state.applied, ours.optimizer.state.skipped) == (3, 1)


@pytest.mark.parametrize("inner", INNER)
def test_a_batch_that_overflows_leaves_no_trace_in_weights_or_inner_optimizer(inner: str) -> None:
    scaled = trained(LossScaleOptimizer(INNER[inner](), 1024.0, 2), data(1))
    plain = trained(INNER[inner](), without(1, *data()))
    assert same(weights(scaled), weights(plain))
    assert same(inner_state(scaled.optimizer), [host(variable) for variable in plain.optimizer.variables])
    assert scaled.optimizer.state.skipped == 1


def test_weights_are_those_of_training_without_scaling() -> None:
    plain = trained(SGD(0.125), data())
    for policy in (NoScaling(), Static(2.0**20), Dynamic(growth_interval=1), Headroom()):
        assert same(weights(trained(LossScaleOptimizer(SGD(0.125), policy=policy), data())), weights(plain)), policy


def test_headroom_finds_its_scale_within_a_step() -> None:
    model = trained(LossScaleOptimizer(SGD(0.125), policy=Headroom(init_scale=2.0**-20)), data(batches=1))
    assert model.optimizer.state.scale > 2.0**5
    assert model.optimizer.state.skipped == 0


def test_the_scale_stays_within_the_bounds_of_the_policy() -> None:
    policy = Dynamic(init_scale=2.0**80, growth_interval=1, min_scale=2.0**79, max_scale=2.0**81)
    good, bad = data(), data(*range(4), target=LARGE)
    assert trained(LossScaleOptimizer(SGD(0.125), policy=policy), good).optimizer.state.scale == 2.0**81
    assert trained(LossScaleOptimizer(SGD(0.125), policy=policy), bad).optimizer.state.scale == 2.0**79


def test_frozen_layers_stay_and_are_not_asked_for_gradients() -> None:
    model = network()
    model.layers[0].trainable = False
    before = weights(model)
    after = weights(trained(LossScaleOptimizer(SGD(0.125)), data(), model))
    assert same(before[:2], after[:2])
    assert not same(before[2:], after[2:])


def test_a_model_with_two_losses_is_skipped_as_a_whole() -> None:
    inputs = keras.Input((4,))
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("left", "right")]
    model = keras.Model(inputs, outputs)
    model.compile(LossScaleOptimizer(SGD(0.125), 1024.0), loss=["mse", "mse"], run_eagerly=True)
    x, good = data(batches=1)
    before = weights(model)
    model.train_on_batch(x, [good, np.full_like(good, 2.0**120)])
    assert same(before, weights(model))
    model.train_on_batch(x, [good, good])
    assert not same(before, weights(model))


def test_an_embedding_trains_by_sparse_gradients() -> None:
    def model() -> Any:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.layers.Embedding(8, 3), keras.layers.Flatten(), keras.layers.Dense(1)])

    words, targets = np.array([[1, 2], [1, 5]], "int32"), np.array([[1.0], [2.0]])
    trained_models = []
    for optimizer in (SGD(0.125), LossScaleOptimizer(SGD(0.125), 1024.0)):
        trained_models.append(model())
        trained_models[-1].compile(optimizer, loss="mse", run_eagerly=True)
        trained_models[-1].fit(words, targets, verbose=0, epochs=2)
    assert same(weights(trained_models[0]), weights(trained_models[1]))
    trained_models[1].fit(words, targets * 2.0**120, verbose=0)
    assert same(weights(trained_models[0]), weights(trained_models[1]))


def tiny_loss(targets: Any, outputs: Any) -> Any:
    return keras.ops.multiply(keras.ops.mean(keras.ops.square(targets - outputs)), 1e-7)


def test_fp16_layers_train_where_their_gradients_would_vanish() -> None:
    def loss(optimizer: Any) -> list[Any]:
        model = network(dtype="mixed_float16")
        x, y = data()
        model.compile(optimizer, loss=tiny_loss, run_eagerly=True)
        before = weights(model)
        model.fit(x, y, batch_size=24, verbose=0, epochs=4)
        return [np.abs(a - b).max() for a, b in zip(before, weights(model), strict=True)]

    assert loss(SGD(1e6))[0] < loss(LossScaleOptimizer(SGD(1e6), policy="auto"))[0]
