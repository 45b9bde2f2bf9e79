"""Reading the loss scale of tf-keras out of a TensorFlow checkpoint."""

from pathlib import Path

from gradscale.peers import import_state
from gradscale.policies.contract import Policy, ScaleState


def read_tf_checkpoint(path: str | Path) -> tuple[Policy, ScaleState]:
    """Returns the rule and the state of tf-keras' `LossScaleOptimizer`, as a TensorFlow checkpoint has them.

    Give the rule, or another, to `LossScaleOptimizer(inner, policy=...)` and the state to its `load_state`. Only the
    scale and its counter are read: growth interval and initial scale are not in a checkpoint, and are tf-keras' own.

    Args:
        path: what was given to `tf.train.Checkpoint.save` or `save_weights`, with the number that it put behind.

    Raises:
        ModuleNotFoundError: TensorFlow, which reads its checkpoints, is not installed.
        ValueError: there is no loss scale in the checkpoint, or more than one.
    """
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(path))
    names = [name for name in reader.get_variable_to_shape_map() if "loss_scale/" in name]
    return import_state("tf-keras", {name: reader.get_tensor(name) for name in names})
