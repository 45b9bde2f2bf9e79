"""Saved and loaded: models, weights alone, files of Keras's own class, and models that are adopted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.engine.older_states import HEADROOM, REFUSED_POLICY
from tests.keras.backend.helpers import data, host, inner_state, network, same, trained, variables, weights

from gradscale import Dynamic, Headroom, Histogram, LogMax, NoScaling, Static, preset
from gradscale.keras import LossScaleOptimizer, adopt

KerasOwn = keras.optimizers.LossScaleOptimizer
Adam = keras.optimizers.Adam

ODD = Dynamic(init_scale=96.0, growth_factor=3.0, growth_interval=4, hysteresis=2, min_scale=2.0, max_scale=4096.0)
POLICIES = [None, ODD, Headroom(), preset("flax")]


def ours(policy: Any = None) -> LossScaleOptimizer:
    return LossScaleOptimizer(Adam(0.01), policy=policy)


def load(path: Path) -> Any:
    return keras.saving.load_model(path)


def train_more(model: Any) -> Any:
    """Trains on three more batches, of which the second overflows."""
    model.fit(*data(1, batches=3), batch_size=4, shuffle=False, verbose=0)
    return model


def assert_same_run(left: Any, right: Any) -> None:
    assert left.optimizer.state == right.optimizer.state
    assert same(weights(left), weights(right))
    assert same(inner_state(left.optimizer), inner_state(right.optimizer))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_loaded_model_continues_bit_exactly(policy: Any, tmp_path: Path) -> None:
    model = trained(ours(policy), data(1, batches=3))
    model.save(tmp_path / "model.keras")
    loaded = load(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.optimizer.policy == model.optimizer.policy
    assert_same_run(loaded, model)
    assert_same_run(train_more(loaded), train_more(model))


@pytest.mark.parametrize("policy", [None, Headroom()], ids=["keras", "headroom"])
def test_weights_alone_carry_the_state_of_the_scale(policy: Any, tmp_path: Path) -> None:
    model = trained(ours(policy), data(1, batches=3))
    model.save_weights(tmp_path / "model.weights.h5")
    other = trained(ours(policy), data(batches=1))
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_run(other, model)


@pytest.mark.parametrize("policy", [None, Headroom()], ids=["keras", "headroom"])
def test_weights_saved_with_keras_own_class_are_read(policy: Any, tmp_path: Path) -> None:
    model = trained(KerasOwn(Adam(0.01)), data(1, batches=3))
    model.save_weights(tmp_path / "model.weights.h5")
    other = trained(ours(policy), data(batches=1))
    other.load_weights(tmp_path / "model.weights.h5")
    assert same(inner_state(other.optimizer), inner_state(model.optimizer))
    state = other.optimizer.state
    assert (state.scale, state.clean_steps) == (host(model.optimizer.dynamic_scale), host(model.optimizer.step_counter))
    assert (state.applied, state.skipped, state.credits) == (0, 0, 1)


@pytest.mark.parametrize("scale", [0.0, np.inf])
def test_a_scale_from_which_keras_own_class_never_recovers_starts_again(scale: float, tmp_path: Path) -> None:
    model = trained(KerasOwn(Adam(0.01)), data(batches=1))
    model.optimizer.dynamic_scale.assign(scale)
    model.save_weights(tmp_path / "model.weights.h5")
    other = trained(ours(), data(batches=1))
    with pytest.warns(UserWarning, match=rf"The saved scale is {scale}.* It starts again at 32768\.0"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert other.optimizer.state.scale == 2.0**15


@pytest.mark.parametrize("policy", [Static(4.0), NoScaling(), Dynamic(init_scale=8.0, max_scale=16.0)])
def test_the_settings_of_today_win_over_a_saved_scale(policy: Any, tmp_path: Path) -> None:
    trained(ours(), data(batches=1)).save_weights(tmp_path / "model.weights.h5")
    other = trained(ours(policy), data(batches=1))
    other.load_weights(tmp_path / "model.weights.h5")
    assert other.optimizer.state.scale == getattr(policy, "max_scale", policy.start().scale)


@pytest.mark.parametrize(
    ("before", "after"),
    [(Headroom(), LogMax()), (Headroom(), Histogram()), (Headroom(), Dynamic()), (Dynamic(), Headroom())],
    ids=lambda policy: type(policy).__name__,
)
def test_another_policy_continues_with_scale_and_counts_of_the_file(before: Any, after: Any, tmp_path: Path) -> None:
    model = trained(ours(before), data(1, batches=3))
    model.save_weights(tmp_path / "model.weights.h5")
    other = trained(ours(after), data(batches=1))
    other.load_weights(tmp_path / "model.weights.h5")
    saved, state = model.optimizer.state, other.optimizer.state
    assert (saved.applied, saved.skipped) == (2, 1)
    kept = {name: getattr(saved, name) for name in ("scale", "clean_steps", "applied", "skipped", "consecutive_skips")}
    assert state == replace(after.start(), **kept)
    assert same(inner_state(other.optimizer), inner_state(model.optimizer))


def test_weights_of_another_inner_optimizer_are_skipped_as_keras_does(tmp_path: Path) -> None:
    trained(LossScaleOptimizer(keras.optimizers.SGD(0.1)), data(batches=1)).save_weights(tmp_path / "model.weights.h5")
    other = trained(ours(), data(batches=1))
    before = other.optimizer.state
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert other.optimizer.state == before


def test_a_model_of_keras_own_class_is_adopted_and_continues_as_it_would_have(tmp_path: Path) -> None:
    model = trained(KerasOwn(Adam(0.01), 1024.0, 3), data(1, batches=3))
    model.save(tmp_path / "model.keras")
    loaded = load(tmp_path / "model.keras")
    assert type(loaded.optimizer) is KerasOwn
    assert adopt(loaded) is loaded.optimizer
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert len(loaded.optimizer.trainable_variables) == len(loaded.trainable_variables)
    train_more(loaded)
    plain = train_more(model)
    assert loaded.optimizer.state.scale == host(plain.optimizer.dynamic_scale)
    assert loaded.optimizer.state.clean_steps == host(plain.optimizer.step_counter)
    np.testing.assert_allclose(weights(loaded)[0], weights(plain)[0], rtol=1e-5)


def test_a_model_that_was_adopted_is_saved_as_ours(tmp_path: Path) -> None:
    model = trained(KerasOwn(Adam(0.01)), data(1, batches=3))
    adopt(model, policy="auto")
    train_more(model).save(tmp_path / "model.keras")
    loaded = load(tmp_path / "model.keras")
    assert loaded.optimizer.policy == Headroom()
    assert_same_run(loaded, model)


def test_a_model_that_is_ours_keeps_its_optimizer_unless_another_policy_is_wanted() -> None:
    model = trained(ours(), data(1, batches=4))
    optimizer = model.optimizer
    assert adopt(model) is optimizer
    assert adopt(model, policy=ODD) is not optimizer
    assert (int(model.optimizer.state.applied), int(model.optimizer.state.skipped)) == (3, 1)
    assert model.optimizer.policy == ODD
    assert model.optimizer.state.scale == ODD.max_scale  # 32768 before


def test_a_model_that_never_trained_is_adopted() -> None:
    model = network()
    model.compile(KerasOwn(Adam(0.01), 64.0), loss="mse", run_eagerly=True)
    assert adopt(model).state.scale == 64.0
    assert train_more(model).optimizer.state.applied == 2


def test_a_model_without_loss_scaling_cannot_be_adopted() -> None:
    model = network()
    model.compile(Adam(0.01), loss="mse")
    with pytest.raises(
        TypeError, match=r"`adopt` takes a compiled model that scales its loss\. Received: a model with"
    ):
        adopt(model)


def test_an_inner_optimizer_that_has_been_at_work_keeps_its_state() -> None:
    class Bare(keras.optimizers.Optimizer):
        def build(self, variables: Any) -> None:  # unlike Keras's own optimizers it does not look if it is built
            super().build(variables)
            self.moments = [self.add_variable_from_reference(variable, "moment") for variable in variables]

    models, inner = variables([1.0]), Bare(0.01)
    inner.build(models)
    count = len(inner.variables)
    LossScaleOptimizer(inner).build(models)
    assert len(inner.variables) == count


def test_a_model_of_an_older_rule_is_refused() -> None:
    config = ours(Headroom()).get_config()
    with pytest.raises(ValueError, match=REFUSED_POLICY):
        LossScaleOptimizer.from_config(config | {"policy": HEADROOM["policy"]})


def test_weights_of_an_older_rule_give_their_scale_and_counters_to_a_new_one() -> None:
    model = trained(ours(Headroom()), data(batches=1))
    saved: dict[str, Any] = {}
    model.optimizer.save_own_variables(saved)
    memory = next(index for index, value in saved.items() if np.shape(value) == (2,) and int(index) > 3)
    older = {**saved, "3": np.float32(8), memory: np.array([0.5, 0.5, 16376, 1, 16384], np.float32)}
    model.optimizer.load_own_variables(older)
    state = model.optimizer.state
    assert (state.scale, state.peak, state.ceiling, state.applied) == (8, 0, Headroom().start().ceiling, 1)
