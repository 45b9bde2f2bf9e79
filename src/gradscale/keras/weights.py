"""How large the weights of a model are, for the report of a run that is stuck."""

import math
from typing import Any

import keras
import numpy as np

from gradscale.engine.diagnosis import Weights


def weights_of(model: Any, at_start: Weights | None = None) -> Weights | None:
    """Returns how large the trainable weights of a model are; None if it has none. Synchronizes with the device.

    `at_start` is what this returned before the first step.
    """
    sizes = [(_largest(variable), variable.path) for variable in model.trainable_variables if math.prod(variable.shape)]
    rate = _on_host(model.optimizer.learning_rate)
    return Weights.of(sizes, None if at_start is None else at_start.largest, rate)


def _largest(variable: Any) -> float:
    # In float32: a maximum of float16 numbers is not supported by every backend.
    magnitudes = keras.ops.abs(keras.ops.cast(keras.ops.convert_to_tensor(variable.value), "float32"))
    # Twice, because some backends' maximum loses a NaN, and a sum never does.
    total = _on_host(keras.ops.sum(magnitudes))
    return total if math.isnan(total) else _on_host(keras.ops.max(magnitudes))


def _on_host(number: Any) -> float:
    return float(np.asarray(keras.ops.convert_to_numpy(number)))
