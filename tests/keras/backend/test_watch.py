"""`Watch`: what it records at which steps of a `fit`, and that the model is left as it was."""

import math
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import BACKEND, data, network

from gradscale import FP16, NoScaling, Static
from gradscale.histogram import exponent_histogram, losses
from gradscale.keras import LossScaleOptimizer, Watch
from gradscale.watching import WatchRow

SGD = keras.optimizers.SGD


def fitted(
    watched: Watch,
    *bad: int,
    scale: float = 1024.0,
    model: Any = None,
    epochs: int = 1,
    policy: Any = None,
    **options: Any,
) -> Any:
    """Returns a model after `fit` with the callback: six batches in order to an epoch."""
    model = network() if model is None else model
    options.setdefault("jit_compile", BACKEND == "jax")
    model.compile(LossScaleOptimizer(SGD(0.01), policy=policy or Static(scale)), loss="mse", **options)
    model.fit(*data(*bad, batches=6), batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[watched])
    return model


def row_of(watched: Watch, name: str, kind: str, step: int = 0) -> WatchRow:
    (found,) = [row for row in watched.rows() if (row.step, row.name, row.kind) == (step, name, kind)]
    return found


def gradients() -> dict[str, Any]:
    """Returns the gradients of the first step of `fitted`, in NumPy: tanh in the hidden layer, a mean of squares."""
    model = network()
    kernel, bias, out, out_bias = (np.asarray(weight, np.float64) for weight in model.get_weights())
    inputs, targets = (np.asarray(each[:4], np.float64) for each in data(batches=6))
    hidden = np.tanh(inputs @ kernel + bias)
    error = 2 * (hidden @ out + out_bias - targets) / targets.size
    before = error @ out.T * (1 - hidden**2)
    return {"hidden/kernel": inputs.T @ before, "hidden/bias": before.sum(0), "out/kernel": hidden.T @ error}


def test_weights_and_gradients_of_all_layers_are_recorded_at_sampled_steps() -> None:
    watched = Watch(every=4)
    fitted(watched, epochs=2)
    assert watched.step_index == 12
    assert {row.step for row in watched.rows()} == {0, 4, 8}
    names = {"hidden/kernel", "hidden/bias", "out/kernel", "out/bias"}
    assert {(row.name, row.kind) for row in watched.rows()} == {
        (name, kind) for name in names for kind in ("weight", "weight_grad")
    }


@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.0])
def test_gradients_are_those_of_the_training_batch_unscaled(scale: float) -> None:
    watched = Watch()
    fitted(watched, scale=scale)
    for name, expected in gradients().items():
        row = row_of(watched, name, "weight_grad")
        assert row.scale == scale
        assert row.amax == pytest.approx(np.abs(expected).max(), rel=1e-5)
        assert row.elements == expected.size


def test_a_row_has_the_facts_of_its_weight() -> None:
    watched = Watch()
    weight = network().get_weights()[0]
    fitted(watched)
    row = row_of(watched, "hidden/kernel", "weight")
    assert (row.elements, row.amax, row.dtype, row.scale) == (12, float(np.abs(weight).max()), "float32", 1.0)
    assert row.formats["FP16"] == losses(exponent_histogram(weight), FP16)


def test_outputs_of_layers_are_those_of_the_given_batch() -> None:
    inputs = data()[0][:5].astype(np.float32)
    model = network()
    expected: dict[str, Any] = {
        "hidden": keras.ops.convert_to_numpy(model.get_layer("hidden")(inputs)),
        "(model)": keras.ops.convert_to_numpy(model(inputs)),
    }
    watched = Watch(batch=inputs)
    fitted(watched)
    assert {row.name for row in watched.rows() if row.kind == "output"} == {"(model)", "hidden", "out"}
    for name, output in expected.items():
        row = row_of(watched, name, "output")
        assert (row.elements, row.amax) == (output.size, pytest.approx(float(np.abs(output).max()), rel=1e-6))


class Subclassed(keras.Model):
    """A model that Keras knows no graph of, with a layer that is called twice and one that returns two tensors."""

    def __init__(self) -> None:
        super().__init__(name="subclassed")
        self.twice = keras.layers.Dense(4, name="twice")
        self.out = keras.layers.Dense(1, name="out")

    def call(self, x: Any) -> Any:
        return self.out(self.twice(self.twice(x)))


def test_outputs_of_a_subclassed_model_are_recorded_and_all_calls_of_a_layer_together() -> None:
    watched = Watch(batch=data()[0][:5], layers="twice")
    fitted(watched, model=Subclassed())
    assert {(row.name, row.kind) for row in watched.rows()} == {
        ("twice", "output"),
        ("twice/kernel", "weight"),
        ("twice/bias", "weight"),
        ("twice/kernel", "weight_grad"),
        ("twice/bias", "weight_grad"),
    }
    assert row_of(watched, "twice", "output").elements == 2 * 5 * 4


def test_a_model_that_is_built_by_its_first_step_has_weights_at_that_step() -> None:
    watched = Watch(layers="twice")
    model = fitted(watched, model=Subclassed())
    assert row_of(watched, "twice/kernel", "weight").elements == 16
    assert row_of(watched, "twice/kernel", "weight_grad").elements == 16
    assert model.built


def test_outputs_in_fp16_are_recorded_with_what_overflows_in_them() -> None:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, dtype="mixed_float16", kernel_initializer="ones", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32", name="out")(hidden))
    watched = Watch(batch=np.full((2, 4), 30000.0, np.float32))
    fitted(watched, model=model)
    row = row_of(watched, "hidden", "output")
    assert (row.dtype, row.infs, row.amax) == ("float16", 6, math.inf)


def test_the_model_is_left_as_it_was() -> None:
    watched = Watch(every=2, batch=data()[0][:5])
    model = fitted(watched)
    assert model.optimizer.recorder is None
    assert model.run_eagerly is False
    assert model.train_function.__name__ != "sampled_step"
    assert all("call" not in vars(layer) for layer in (model, *model.layers))


def test_a_run_that_is_watched_takes_the_same_steps() -> None:
    model, alone = fitted(Watch(every=2, batch=data()[0][:5]), 3), network()
    alone.compile(LossScaleOptimizer(SGD(0.01), policy=Static(1024.0)), loss="mse")
    alone.fit(*data(3, batches=6), batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.state.skipped) == int(alone.optimizer.state.skipped) == 1
    for left, right in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)


def test_a_skipped_step_is_recorded_with_its_infs() -> None:
    watched = Watch()
    fitted(watched, 0)
    row = row_of(watched, "hidden/kernel", "weight_grad")
    assert row.infs + row.nans > 0


def test_a_step_that_raises_leaves_the_compiled_function_in_place() -> None:
    watched, model = Watch(), network()
    model.compile(LossScaleOptimizer(SGD(0.01)), loss="mse")
    inputs, targets = data()
    with pytest.raises(Exception, match=r".*"):
        model.fit(inputs[:, :3], targets, verbose=0, callbacks=[watched])
    model.fit(inputs, targets, verbose=0)
    assert model.optimizer.recorder is None
    assert watched.rows() == []


def test_only_steps_in_the_given_ranges_are_sampled_over_several_fits() -> None:
    watched = Watch(every=1, steps=[(5, 8)])
    model = fitted(watched)
    model.fit(*data(batches=6), batch_size=4, verbose=0, callbacks=[watched])
    assert {row.step for row in watched.rows()} == {5, 6, 7}


def test_without_scaling_the_gradients_have_a_scale_of_1() -> None:
    watched = Watch()
    fitted(watched, policy=NoScaling())
    row = row_of(watched, "hidden/kernel", "weight_grad")
    assert (row.scale, row.amax) == (1.0, pytest.approx(np.abs(gradients()["hidden/kernel"]).max(), rel=1e-5))


def test_an_embedding_has_the_gradients_of_the_rows_that_were_used() -> None:
    model: Any = keras.Sequential(
        [keras.layers.Input((2,), dtype="int32"), keras.layers.Embedding(50, 3, name="table"), keras.layers.Flatten()]
    )
    model.compile(LossScaleOptimizer(SGD(0.01), policy=Static(1024.0)), loss="mse", jit_compile=BACKEND == "jax")
    watched = Watch()
    model.fit(np.array([[1, 2], [3, 4]]), np.ones((2, 6)), verbose=0, callbacks=[watched])
    row = row_of(watched, "table/embeddings", "weight_grad")
    # TensorFlow's are sparse: only the rows in use are there.
    assert row.elements * (1 - row.zeros) == pytest.approx(12)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch has one step to an execution")
def test_several_steps_of_one_execution_count_as_one() -> None:
    watched = Watch(every=2)
    fitted(watched, steps_per_execution=2)
    assert watched.step_index == 3
    assert row_of(watched, "hidden/kernel", "weight_grad", 2).elements == 12


def test_layers_that_match_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`layers` must be found in the path of a layer\. Received: layers='encoder'"):
        fitted(Watch(layers="encoder"))


def test_an_optimizer_of_keras_own_is_refused() -> None:
    model = network()
    model.compile(SGD(), loss="mse")
    with pytest.raises(TypeError, match=r"`Watch` reads a `gradscale\.keras\.LossScaleOptimizer`"):
        model.fit(*data(), verbose=0, callbacks=[Watch()])


def test_rows_become_a_table() -> None:
    watched = Watch(formats=["fp16", "e4m3"])
    fitted(watched)
    assert "hidden/kernel" in watched.table("e4m3")
    assert "fp8_e4m3_snr_db" in watched.to_dicts()[0]
