"""`explain`: what of a model computes and is stored in which precision, and whether a scaler is needed."""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from gradscale.keras.explain_advice import advice
from gradscale.keras.explain_rows import Explanation, LayerRow


def explain(model: Any, *, warn: bool = False) -> Explanation:
    """Returns what of `model` computes and is stored in which precision, and what is likely to be a mistake.

        print(explain(model))

    Runs nothing. Knows the optimizer of a model that is compiled; before that, nothing is said of it. Layers that are
    alike, and whose names differ in a number at the end only, share a row.

    Args:
        model: a Keras model or layer.
        warn: emit the warnings as well.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(f"`model` must be a Keras model or layer. Received: {type(model).__name__}.")
    layers = _layers(model)
    optimizer = getattr(model, "optimizer", None)
    scaling, mistakes = advice(layers, _outputs(model), optimizer)
    for mistake in mistakes if warn else ():
        warnings.warn(mistake, stacklevel=2)
    return Explanation(_rows(model, layers), _kind(optimizer), scaling, tuple(mistakes))


def _layers(model: Any) -> list[Any]:
    """Returns the layers that compute something: those that hold weights themselves, or no other layers."""
    inner = {id(layer): layer for layer in _flattened(model)}.values()  # a layer may stand in several places
    computing = [layer for layer in inner if not isinstance(layer, keras.layers.InputLayer)]
    return [layer for layer in computing if _own_weights(layer) or not layer._layers]


def _flattened(layer: Any) -> Iterator[Any]:
    """Yields a layer and all that are inside it, in their order, which Keras' own `_flatten_layers` turns around."""
    yield layer
    for inner in layer._layers:
        yield from _flattened(inner)


def _own_weights(layer: Any) -> list[Any]:
    """Returns the floating-point variables of a layer, without those of layers inside it."""
    inside = {id(weight) for inner in layer._layers for weight in inner.variables}
    return [weight for weight in layer.variables if id(weight) not in inside and "float" in weight.dtype]


def _outputs(model: Any) -> list[Any]:
    """Returns the layers whose results the model returns, as far as it tells."""
    if isinstance(model, keras.Sequential):
        return model.layers[-1:]
    names = getattr(model, "output_names", ())
    return [layer for layer in getattr(model, "layers", ()) if layer.name in names]


def _rows(model: Any, layers: Iterable[Any]) -> tuple[LayerRow, ...]:
    alike: defaultdict[tuple[str, ...], list[Any]] = defaultdict(list)
    for layer in layers:
        base = re.sub(r"_\d+(?=/|$)", "", _path(model, layer))
        alike[base, type(layer).__name__, _stored(layer), layer.compute_dtype].append(layer)
    return tuple(
        LayerRow(
            name=base if len(group) > 1 else _path(model, group[0]),
            count=len(group),
            kind=kind,
            weights=weights,
            runs=runs,
            elements=sum(_elements(weight.shape) for layer in group for weight in _own_weights(layer)),
        )
        for (base, kind, weights, runs), group in alike.items()
    )


def _path(model: Any, layer: Any) -> str:
    """Returns where in the model a layer stands. A layer without weights knows no more than its name."""
    return (layer.path or layer.name).removeprefix(f"{model.name}/")


def _stored(layer: Any) -> str:
    return ", ".join(sorted({weight.dtype for weight in _own_weights(layer)}))


def _elements(shape: Sequence[int]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements


def _kind(optimizer: Any) -> str:
    """Returns the class of an optimizer, with what is inside it.

    >>> _kind(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    'LossScaleOptimizer(SGD)'
    """
    if optimizer is None:
        return ""
    inner = getattr(optimizer, "inner_optimizer", None)
    return f"{type(optimizer).__name__}({_kind(inner)})" if inner is not None else type(optimizer).__name__
