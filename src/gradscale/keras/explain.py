"""`explain`: which layers of a model compute and are stored in which dtype, and whether a scaler is needed."""

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from gradscale.explain import LayerRow, explanation_text, layer_table, merged_rows, scaler_warning, scaling_advice
from gradscale.formats import FP16
from gradscale.keras.optimizer import KerasLossScaleOptimizer, LossScaleOptimizer
from gradscale.policies.static import multiplies

ADD_SCALER = (
    "Compile it with `gradscale.keras.LossScaleOptimizer`, or use BF16. Keras adds a scaler of its own only to a model "
    "whose dtype policy is 'mixed_float16'."
)
REMOVE_SCALER = "Compile the model with its inner optimizer."

PROBABILITIES = (keras.activations.softmax, keras.activations.sigmoid)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. Printed, it is a table.

    Attributes:
        layers: which layers compute in which dtype.
        optimizer: class of the optimizer, with its inner optimizer; empty for a model that is not compiled.
        scaling: whether a scaler is needed, and why.
        warnings: what is likely to be a mistake.
    """

    layers: tuple[LayerRow, ...]
    optimizer: str
    scaling: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Returns a table of layers, the optimizer, the advice on scaling and the warnings."""
        optimizer = f"Optimizer: {self.optimizer or 'none: the model is not compiled'}"
        tables = [layer_table("layer", self.layers, buffers=False), optimizer]
        return explanation_text(tables, self.scaling, self.warnings)


def explain(model: Any, *, warn: bool = False) -> Explanation:
    """Returns which layers of `model` compute and are stored in which dtype, and what is likely to be a mistake.

        print(explain(model))

    Does not run the model. The optimizer is that of a compiled model; for any other model it is not reported. Layers
    of the same class and dtypes, whose names differ only in a number at the end, share a row.

    Args:
        model: a Keras model or layer.
        warn: emit the warnings as well.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(f"`model` must be a Keras model or layer. Received: {type(model).__name__}.")
    # Those that compute something: they hold weights themselves, or no other layers.
    layers = [layer for layer in distinct_layers(model) if own_weights(layer) or not layer._layers]
    optimizer = getattr(model, "optimizer", None)
    rows = merged_rows((_row(model, layer) for layer in layers), _shared_name)
    trained = [weight for layer in layers for weight in layer.trainable_variables]
    scaling = scaling_advice({layer.compute_dtype for layer in layers} | {weight.dtype for weight in trained})
    mistakes = [*_mistakes_of_dtypes(_outputs(model), trained), *_mistakes_of_optimizer(optimizer, scaling)]
    for mistake in mistakes if warn else ():
        warnings.warn(mistake, stacklevel=2)
    return Explanation(rows, _kind(optimizer), scaling, tuple(mistakes))


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


def _outputs(model: Any) -> list[Any]:
    """Returns the layers whose results the model returns, where Keras knows them."""
    if isinstance(model, keras.Sequential):
        return model.layers[-1:]
    names = getattr(model, "output_names", ())
    return [layer for layer in getattr(model, "layers", ()) if layer.name in names]


def _row(model: Any, layer: Any) -> tuple[str, LayerRow]:
    """Returns the row of a layer, and its path without the numbers that Keras adds."""
    weights, path = own_weights(layer), path_in(model, layer)
    row = LayerRow(
        name=path,
        count=1,
        kind=type(layer).__name__,
        weights=", ".join(sorted({weight.dtype for weight in weights})),
        compute_dtype=layer.compute_dtype,
        elements=sum(math.prod(weight.shape) for weight in weights),
    )
    return _unnumbered(path), row


def _shared_name(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else _unnumbered(paths[0])


def _unnumbered(path: str) -> str:
    """Returns a path without numbers at the end of names.

    >>> _unnumbered("block_1/dense_2")
    'block/dense'
    """
    return re.sub(r"_\d+(?=/|$)", "", path)


def _kind(optimizer: Any) -> str:
    """Returns the class of an optimizer, with its inner optimizer.

    >>> _kind(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    'LossScaleOptimizer(SGD)'
    """
    if optimizer is None:
        return ""
    inner = getattr(optimizer, "inner_optimizer", None)
    return f"{type(optimizer).__name__}({_kind(inner)})" if inner is not None else type(optimizer).__name__


def _mistakes_of_dtypes(outputs: Sequence[Any], trained: Sequence[Any]) -> Iterator[str]:
    """Yields warnings of layers, whose results the model returns, and of weights in half precision."""
    made = [
        layer
        for layer in outputs
        if isinstance(layer, keras.layers.Softmax) or getattr(layer, "activation", None) in PROBABILITIES
    ]
    if half := [layer for layer in made if layer.compute_dtype == "float16"]:
        yield (
            f"The output layer {half[0].name!r} makes probabilities in FP16: those below "
            f"{FP16.smallest_subnormal:.1e} are 0, and their logarithm is lost. Give it dtype='float32', or return "
            "logits and build the loss with from_logits=True."
        )
    if stored := [weight for weight in trained if weight.dtype in ("float16", "bfloat16")]:
        yield (
            f"{len(stored)} weights are stored in half precision, such as {stored[0].path!r}: updates below half a "
            "unit in the last place are lost. Use 'mixed_float16' or 'mixed_bfloat16', which store float32."
        )


def _mistakes_of_optimizer(optimizer: Any, scaling: str) -> Iterator[str]:
    """Yields warnings of a scaler that is missing, not needed, inside another, or Keras's own."""
    if optimizer is None:
        return
    ours, is_keras = isinstance(optimizer, LossScaleOptimizer), isinstance(optimizer, KerasLossScaleOptimizer)
    scales = multiplies(optimizer.policy) if ours else is_keras or optimizer.loss_scale_factor is not None
    if (mistake := scaler_warning(scaling, scales=scales, add=ADD_SCALER, remove=REMOVE_SCALER)) is not None:
        yield mistake
    if isinstance(getattr(optimizer, "inner_optimizer", None), KerasLossScaleOptimizer):
        yield (
            "A scaler is inside another: the inner one divides the gradients again, by a scale that no loss was "
            "multiplied by. Wrap an optimizer once."
        )
    if is_keras and not ours:
        yield (
            "The scaler is Keras's own: its scale has no bounds, it does not report skipped steps, and under "
            "MirroredStrategy an overflow on one replica reaches the weights. `gradscale.keras.adopt(model)` replaces "
            "it, and keeps its scale."
        )
