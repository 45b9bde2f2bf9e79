"""From Keras' own `LossScaleOptimizer` to ours, in the middle of a training run."""

from dataclasses import replace
from typing import Any, Literal

import keras

from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.keras.packing import on_host
from gradscale.keras.saved import COUNTED, fitted
from gradscale.policies.contract import Policy


def adopt(model: Any, policy: Policy | Literal["auto"] | None = None) -> LossScaleOptimizer:
    """Replaces the model's own loss scaling by gradscale's, and returns the optimizer that the model now has.

    Scale, clean steps and the inner optimizer with all its state go on where they were. For a model that
    `keras.saving.load_model` has read, or that was compiled under `mixed_float16`, which wraps every optimizer in
    Keras' own class. A model that has ours already keeps it.

    Args:
        model: a compiled model.
        policy: the rule for the scale from now on; by default Keras' own, with the settings it had.

    Raises:
        TypeError: the model has no loss scaling. Compile it with `LossScaleOptimizer(optimizer)`.
    """
    before = getattr(model, "optimizer", None)
    if isinstance(before, LossScaleOptimizer) and policy is None:
        return before
    if not isinstance(before, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "`adopt` takes a compiled model that scales its loss. "
            f"Received: a model with optimizer={before!r}. Compile it with `LossScaleOptimizer(optimizer)`."
        )
    after = _taken_over(before, policy)
    model.optimizer = after
    model.train_function = None  # it was compiled with the old optimizer
    if hasattr(model, "_compile_config"):
        model._compile_config.config["optimizer"] = after  # what `model.save` writes
    return after


def _taken_over(before: Any, policy: Policy | Literal["auto"] | None) -> LossScaleOptimizer:
    """Returns an optimizer that goes on where `before` is."""
    settings: dict[str, Any] = {"policy": policy}
    if policy is None:
        settings = {"initial_scale": before.initial_scale, "dynamic_growth_steps": before.dynamic_growth_steps}
    after = LossScaleOptimizer(before.inner_optimizer, name=before.name, **settings)
    if before.built:
        after.build(before._trainable_variables)
        (scale,), (clean_steps,) = (
            on_host(before.dynamic_scale.value, "float32"),
            on_host(before.step_counter.value, "int32"),
        )
        state = replace(after.policy.start(), scale=scale, clean_steps=clean_steps, **_counts(before))
        after.load_state(fitted(state, after.policy))
    return after


def _counts(before: Any) -> dict[str, Any]:
    """Returns the counters of ours, which go on; Keras' own has none."""
    if not isinstance(before, LossScaleOptimizer):
        return {}
    state = before.state
    return {name: getattr(state, name) for name in COUNTED}
