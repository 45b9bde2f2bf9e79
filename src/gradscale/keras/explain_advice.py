"""Whether a Keras model needs a scaler, and which of its dtypes are likely to be a mistake."""

from collections.abc import Sequence
from typing import Any

import keras

from gradscale.explain import scaler_warning, scaling_advice
from gradscale.formats import FP16
from gradscale.keras.optimizer import KerasLossScaleOptimizer, LossScaleOptimizer
from gradscale.policies.static import multiplies

ADD_SCALER = (
    "Compile it with `gradscale.keras.LossScaleOptimizer`, or use BF16. Keras adds a scaler of its own only to a model "
    "whose dtype policy is 'mixed_float16'."
)
REMOVE_SCALER = "Compile the model with its inner optimizer."

PROBABILITIES = (keras.activations.softmax, keras.activations.sigmoid)


def advice(layers: Sequence[Any], outputs: Sequence[Any], optimizer: Any) -> tuple[str, list[str]]:
    """Returns whether a scaler is needed and why, and warnings of what is likely to be a mistake.

    Args:
        layers: the layers that compute something.
        outputs: those whose results the model returns.
        optimizer: that of the model; None gives no warning about it.
    """
    trained = [weight for layer in layers for weight in layer.trainable_variables]
    scaling = scaling_advice({layer.compute_dtype for layer in layers} | {weight.dtype for weight in trained})
    found = [_half_probabilities(outputs), _half_weights(trained)]
    if optimizer is not None:
        scaler = scaler_warning(scaling, scales=_scales(optimizer), add=ADD_SCALER, remove=REMOVE_SCALER)
        found += [scaler, _scaled_twice(optimizer), _keras_own(optimizer)]
    return scaling, [warning for warning in found if warning]


def _scales(optimizer: Any) -> bool:
    """Returns whether `optimizer` multiplies losses by a scale."""
    if isinstance(optimizer, LossScaleOptimizer):
        return multiplies(optimizer.policy)
    return isinstance(optimizer, KerasLossScaleOptimizer) or optimizer.loss_scale_factor is not None


def _scaled_twice(optimizer: Any) -> str | None:
    if not isinstance(getattr(optimizer, "inner_optimizer", None), KerasLossScaleOptimizer):
        return None
    return (
        "A scaler is inside another: the inner one divides the gradients again, by a scale that no loss was multiplied "
        "by. Wrap an optimizer once."
    )


def _keras_own(optimizer: Any) -> str | None:
    if not isinstance(optimizer, KerasLossScaleOptimizer) or isinstance(optimizer, LossScaleOptimizer):
        return None
    return (
        "The scaler is Keras's own: its scale has no bounds, it does not report skipped steps, and under "
        "MirroredStrategy an overflow on one replica reaches the weights. `gradscale.keras.adopt(model)` replaces it, "
        "and keeps its scale."
    )


def _half_probabilities(outputs: Sequence[Any]) -> str | None:
    half = [layer for layer in outputs if layer.compute_dtype == "float16" and _makes_probabilities(layer)]
    if not half:
        return None
    return (
        f"The output layer {half[0].name!r} makes probabilities in FP16: those below "
        f"{FP16.smallest_subnormal:.1e} are 0, and their logarithm is lost. Give it dtype='float32', or return logits "
        "and build the loss with from_logits=True."
    )


def _makes_probabilities(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Softmax) or getattr(layer, "activation", None) in PROBABILITIES


def _half_weights(trained: Sequence[Any]) -> str | None:
    half = [weight for weight in trained if weight.dtype in ("float16", "bfloat16")]
    if not half:
        return None
    return (
        f"{len(half)} weights are stored in half precision, such as {half[0].path!r}: updates below half a unit in "
        "the last place are lost. Use 'mixed_float16' or 'mixed_bfloat16', which store float32."
    )
