"""The recipe for activations: outputs of all layers, counted in NumPy, on each backend."""

from typing import Any

import keras
import numpy as np

from gradscale.histogram import exponent_histogram, losses


def test_the_outputs_of_all_layers_can_be_counted() -> None:
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="relu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="last")(hidden))
    x = np.ones((5, 3), np.float32)
    taps = keras.Model(model.input, [layer.output for layer in model.layers])
    outputs: dict[str, Any] = {
        layer.name: keras.ops.convert_to_numpy(output) for layer, output in zip(model.layers, taps(x), strict=True)
    }
    assert outputs["hidden"].shape == (5, 4)
    np.testing.assert_array_equal(outputs["last"], keras.ops.convert_to_numpy(model(x)))
    assert losses(exponent_histogram(outputs["last"]), "FP16").flushed == 0.0
