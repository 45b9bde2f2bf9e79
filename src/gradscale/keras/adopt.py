"""From Keras's own `LossScaleOptimizer`, or that of tf-keras, to ours, in the middle of a training run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.keras.variables import COUNTERS, fitted, on_host
from gradscale.peers import import_state
from gradscale.policies.contract import Policy, ScaleState


def adopt(model: Any, policy: Policy | str | None = None) -> LossScaleOptimizer:
    """Replaces the model's own loss scaling by gradscale's, and returns the model's new optimizer.

    Scale, clean steps and the inner optimizer with all its state are kept. For a model from `keras.saving.load_model`,
    or one that was compiled under `mixed_float16`, which wraps every optimizer in Keras's own class. A model that has
    gradscale's optimizer keeps it.

    Args:
        model: a compiled model.
        policy: the new rule for the scale; by default Keras's own, with its settings.

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
    after = _replacement(before, policy)
    model.optimizer = after
    # Not `model.compile` again, which would need the user's other arguments and reset the metrics.
    model.train_function = None  # it was compiled with the old optimizer
    if hasattr(model, "_compile_config"):
        model._compile_config.config["optimizer"] = after  # what `model.save` writes
    return after


def read_tf_checkpoint(path: str | Path) -> tuple[Policy, ScaleState]:
    """Returns the rule and the state of tf-keras's `LossScaleOptimizer`, as a TensorFlow checkpoint has them.

    Give the rule, or another, to `LossScaleOptimizer(inner, policy=...)` and the state to its `load_state`. Only the
    scale and its counter are read: growth interval and initial scale are not in a checkpoint, and are tf-keras's own.

    Args:
        path: what was given to `tf.train.Checkpoint.save` or `save_weights`, with the number that it appended.

    Raises:
        ModuleNotFoundError: TensorFlow, which reads its checkpoints, is not installed.
        ValueError: there is no loss scale in the checkpoint, or more than one.
    """
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(path))
    # tf-keras's names: optimizer/loss_scale/current_loss_scale and good_steps. Its .keras and .h5 files hold neither.
    names = [name for name in reader.get_variable_to_shape_map() if "loss_scale/" in name]
    return import_state("tf-keras", {name: reader.get_tensor(name) for name in names})


def _replacement(before: Any, policy: Policy | str | None) -> LossScaleOptimizer:
    """Returns an optimizer that continues from `before`."""
    settings: dict[str, Any] = {"policy": policy}
    if policy is None:
        settings = {"initial_scale": before.initial_scale, "dynamic_growth_steps": before.dynamic_growth_steps}
    after = LossScaleOptimizer(before.inner_optimizer, name=before.name, **settings)
    if before.built:
        # Those of the inner optimizer: Keras's own class keeps no list of them before Keras 3.12.
        after.build(before.inner_optimizer._trainable_variables)
        (scale,), (clean_steps,) = (
            on_host(before.dynamic_scale.value, "float32"),
            on_host(before.step_counter.value, "int32"),
        )
        # The counters of gradscale's class are kept; Keras's own has none.
        counts = (
            {name: getattr(before.state, name) for name in COUNTERS} if isinstance(before, LossScaleOptimizer) else {}
        )
        state = replace(after.policy.start(), scale=scale, clean_steps=clean_steps, **counts)
        after.load_state(fitted(state, after.policy))
    return after
