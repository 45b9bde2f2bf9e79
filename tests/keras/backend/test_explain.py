"""`explain`: what it reports of layers, and each mistake that it finds."""

from typing import Any

import keras
import pytest

from gradscale import NoScaling
from gradscale.explain import LayerRow
from gradscale.keras import LossScaleOptimizer, explain

KerasOwn: Any = keras.optimizers.LossScaleOptimizer
SGD = keras.optimizers.SGD


def model(dtype: str = "mixed_float16", *, head: str = "float32", activation: str | None = "softmax") -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(3, dtype=dtype, name="dense_1"),
            layers.Dense(3, dtype=dtype, name="dense_2"),
            layers.Dropout(0.5, dtype=dtype, name="drop"),
            layers.Dense(2, activation=activation, dtype=head, name="head"),
        ],
        name="net",
    )


def compiled(optimizer: Any, made: Any = None, **options: Any) -> Any:
    made = model() if made is None else made
    made.compile(optimizer, loss="mse", **options)
    return made


def warnings_of(made: Any) -> tuple[str, ...]:
    return explain(made).warnings


def test_layers_of_one_class_and_dtype_share_a_row() -> None:
    assert [(row.count, row.kind, row.weights, row.compute_dtype, row.elements) for row in explain(model()).layers] == [
        (2, "Dense", "float32", "float16", 27),
        (1, "Dropout", "", "float16", 0),
        (1, "Dense", "float32", "float32", 8),
    ]


def test_it_prints_as_a_table() -> None:
    lines = str(explain(compiled(LossScaleOptimizer(SGD())))).splitlines()
    assert lines[0].split() == ["layer", "class", "weights", "computes", "in", "elements"]
    assert lines[2].split() == ["dense", "(2)", "Dense", "float32", "float16", "27"]
    assert "Optimizer: LossScaleOptimizer(SGD)" in lines
    assert lines[-1].startswith("Scaler: needed. FP16 holds nothing below 6.0e-08 and nothing above 65504")


def test_layers_inside_layers_and_models_are_found() -> None:
    inner = model("mixed_float16")
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, keras.layers.Dense(1, name="last")(inner(inputs)))
    names = [row.name.split("/")[-1] for row in explain(outer).layers]
    assert names == ["dense", "drop", "head", "last"]
    attention = keras.layers.MultiHeadAttention(2, 4)
    attention.build((1, 3, 8), (1, 3, 8))
    kinds = [row.kind for row in explain(attention).layers]
    assert kinds.count("EinsumDense") == 4


def test_what_a_scaler_is_for_is_reported() -> None:
    assert explain(model("float32")).scaling == "not needed. Everything runs in float32."
    assert explain(model("mixed_bfloat16")).scaling.startswith("not needed. BF16 has the range of float32")
    assert explain(model("mixed_float16")).scaling.startswith("needed.")


def test_a_sound_model_has_no_warning() -> None:
    assert warnings_of(compiled(LossScaleOptimizer(SGD()))) == ()
    assert warnings_of(compiled(SGD(), model("float32"))) == ()
    assert warnings_of(compiled(SGD(), model("mixed_bfloat16"))) == ()
    assert warnings_of(model("mixed_float16")) == ()


@pytest.mark.parametrize("optimizer", [SGD(), LossScaleOptimizer(SGD(), policy=NoScaling())], ids=["none", "idle"])
def test_a_missing_scaler_is_found(optimizer: Any) -> None:
    (warning,) = warnings_of(compiled(optimizer, auto_scale_loss=False))
    assert warning.startswith("FP16 runs with no scaler: small gradients vanish")


def test_a_fixed_factor_of_the_optimizer_is_a_scaler() -> None:
    assert warnings_of(compiled(SGD(loss_scale_factor=128.0), auto_scale_loss=False)) == ()


def test_a_scaler_without_float16_is_found() -> None:
    (warning,) = warnings_of(compiled(LossScaleOptimizer(SGD()), model("mixed_bfloat16")))
    assert warning.startswith("A scaler runs for nothing")


def test_a_scaler_inside_another_is_found() -> None:
    optimizer = LossScaleOptimizer(SGD())
    optimizer.inner_optimizer = KerasOwn(SGD())
    (warning,) = warnings_of(compiled(optimizer))
    assert warning.startswith("A scaler is inside another")


def test_the_scaler_that_keras_adds_is_found() -> None:
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)], name="plain")
    made.dtype_policy = keras.DTypePolicy("mixed_float16")
    made.layers[0].dtype_policy = keras.DTypePolicy("mixed_float16")
    made.compile("sgd", loss="mse")
    (warning,) = warnings_of(made)
    assert warning.startswith("The scaler is Keras's own")
    assert "`gradscale.keras.adopt(model)`" in warning


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_probabilities_in_float16_are_found(activation: str) -> None:
    (warning,) = warnings_of(model(head="mixed_float16", activation=activation))
    assert warning.startswith("The output layer 'head' makes probabilities in FP16")


def test_a_softmax_layer_in_float16_is_found() -> None:
    made = model(head="mixed_float16", activation=None)
    made.add(keras.layers.Softmax(dtype="mixed_float16", name="last"))
    (warning,) = warnings_of(made)
    assert warning.startswith("The output layer 'last' makes probabilities in FP16")


def test_logits_in_float16_and_a_softmax_inside_are_no_mistake() -> None:
    assert warnings_of(model(head="mixed_float16", activation=None)) == ()
    inputs = keras.Input((4,))
    inside = keras.layers.Dense(3, activation="softmax", dtype="mixed_float16")(inputs)
    assert warnings_of(keras.Model(inputs, keras.layers.Dense(2)(inside))) == ()


def test_weights_in_half_precision_are_found() -> None:
    (warning,) = warnings_of(model("float16"))
    assert warning.startswith("4 weights are stored in half precision, such as ")


def test_warnings_are_emitted_if_asked_for() -> None:
    with pytest.warns(UserWarning, match="4 weights are stored in half precision"):
        explain(model("bfloat16"), warn=True)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`model` must be a Keras model or layer\. Received: int\."):
        explain(3)


def test_a_row_is_a_value() -> None:
    row = explain(model()).layers[1]
    assert row == LayerRow("drop", 1, "Dropout", "", "float16", 0)
