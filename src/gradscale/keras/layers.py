"""The layers of a model, their own weights, and their paths."""

from collections.abc import Iterator
from typing import Any

import keras


def flattened(layer: Any) -> Iterator[Any]:
    """Yields a layer and all of its sublayers in order."""
    # Not Keras's own `_flatten_layers`, which reverses the order.
    yield layer
    for sublayer in layer._layers:
        yield from flattened(sublayer)


def distinct_layers(model: Any) -> list[Any]:
    """Returns a model and all of its sublayers, each once though it may be in several places; without inputs."""
    found = {id(layer): layer for layer in flattened(model)}.values()
    return [layer for layer in found if not isinstance(layer, keras.layers.InputLayer)]


def own_weights(layer: Any) -> list[Any]:
    """Returns the floating-point variables of a layer, without those of its sublayers."""
    of_sublayers = {id(weight) for sublayer in layer._layers for weight in sublayer.variables}
    return [weight for weight in layer.variables if id(weight) not in of_sublayers and "float" in weight.dtype]


def path_in(model: Any, part: Any) -> str:
    """Returns the path of a layer or a variable in a model."""
    # Keras sets no path on a layer without weights.
    return (part.path or part.name).removeprefix(f"{model.name}/")
