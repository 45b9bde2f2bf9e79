"""Whether a model needs a scaler, and what about its precisions is likely to be a mistake."""

from collections.abc import Sequence
from typing import Any

import keras

from gradscale.formats import FP16
from gradscale.keras.optimizer import KerasLossScaleOptimizer, LossScaleOptimizer

HALF = "float16"

NEEDED = (
    f"needed. FP16 holds nothing below {FP16.smallest_subnormal:.1e} and nothing above {FP16.max:g}: without one, "
    "small gradients vanish."
)
NOT_NEEDED_BF16 = "not needed. BF16 has the range of float32: gradients neither vanish nor overflow for want of it."
NOT_NEEDED = "not needed. Everything runs in float32."

PROBABILITIES = (keras.activations.softmax, keras.activations.sigmoid)


def advice(layers: Sequence[Any], outputs: Sequence[Any], optimizer: Any) -> tuple[str, list[str]]:
    """Returns whether a scaler is needed and why, and what is likely to be a mistake.

    Args:
        layers: the layers that compute something.
        outputs: those whose results the model returns.
        optimizer: that of the model; with None, nothing is said of it.
    """
    computed = {layer.compute_dtype for layer in layers} | {weight.dtype for weight in _trained(layers)}
    if HALF in computed:
        scaling = NEEDED
    else:
        scaling = NOT_NEEDED_BF16 if "bfloat16" in computed else NOT_NEEDED
    found = [_half_probabilities(outputs), _half_weights(layers)]
    if optimizer is not None:
        checks = (_scaler_missing, _scaler_idle)
        found += [*(check(scaling, optimizer) for check in checks), _scaled_twice(optimizer), _keras_own(optimizer)]
    return scaling, [mistake for mistake in found if mistake]


def _scales(optimizer: Any) -> bool:
    """Returns whether `optimizer` multiplies losses at all."""
    if isinstance(optimizer, LossScaleOptimizer):
        return bool(optimizer.policy.needs)
    return isinstance(optimizer, KerasLossScaleOptimizer) or optimizer.loss_scale_factor is not None


def _trained(layers: Sequence[Any]) -> list[Any]:
    return [weight for layer in layers for weight in layer.trainable_variables]


def _scaler_missing(scaling: str, optimizer: Any) -> str | None:
    if scaling is not NEEDED or _scales(optimizer):
        return None
    return (
        "FP16 runs with no scaler: small gradients vanish, and the model stops to learn. Compile it with "
        "`gradscale.keras.LossScaleOptimizer`, or use BF16. Keras adds a scaler of its own only to a model whose dtype "
        "policy is 'mixed_float16'."
    )


def _scaler_idle(scaling: str, optimizer: Any) -> str | None:
    if scaling is NEEDED or not _scales(optimizer):
        return None
    return (
        "A scaler runs for nothing: there is no FP16 here, and it reads every gradient at every step. Compile the "
        "model with the optimizer inside of it."
    )


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
        "The scaler is Keras' own: its scale has no bounds, nothing tells of a skip, and under MirroredStrategy an "
        "overflow on one replica reaches the weights. `gradscale.keras.adopt(model)` replaces it, scale and all."
    )


def _half_probabilities(outputs: Sequence[Any]) -> str | None:
    halves = [layer for layer in outputs if layer.compute_dtype == HALF and _makes_probabilities(layer)]
    if not halves:
        return None
    return (
        f"The output layer {halves[0].name!r} makes probabilities in FP16: those below "
        f"{FP16.smallest_subnormal:.1e} are 0, and their logarithm is lost. Give it dtype='float32', or return logits "
        "and let the loss have from_logits=True."
    )


def _makes_probabilities(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Softmax) or getattr(layer, "activation", None) in PROBABILITIES


def _half_weights(layers: Sequence[Any]) -> str | None:
    halves = [weight for weight in _trained(layers) if weight.dtype in (HALF, "bfloat16")]
    if not halves:
        return None
    return (
        f"{len(halves)} weights are stored in half precision, such as {halves[0].path!r}: updates below half a unit in "
        "the last place are lost. Use 'mixed_float16' or 'mixed_bfloat16', which store float32."
    )
