"""A checkpoint that tf-keras wrote is read, and training goes on from its scale."""

from pathlib import Path

import keras
import pytest
from tests.keras.backend.helpers import BACKEND, tensors, variables

from gradscale import preset
from gradscale.keras import LossScaleOptimizer, read_tf_checkpoint

if BACKEND != "tensorflow":
    pytest.skip("the same on every backend", allow_module_level=True)

CHECKPOINT = Path(__file__).parents[2] / "data" / "tf_keras_checkpoint"


def test_scale_and_good_steps_are_found() -> None:
    policy, state = read_tf_checkpoint(CHECKPOINT)
    assert policy == preset("tf-keras")
    assert (state.scale, state.clean_steps) == (2048.0, 2)


@pytest.mark.parametrize("keeps_rule", [True, False])
def test_training_continues_from_there(keeps_rule: bool) -> None:
    policy, state = read_tf_checkpoint(CHECKPOINT)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=policy if keeps_rule else None)
    optimizer.load_state(state)
    models = variables([1.0])
    optimizer.apply(tensors([2048.0]), models)
    assert (optimizer.state.scale, optimizer.state.clean_steps) == (2048.0, 3)
    assert type(optimizer.state) is type(optimizer.policy.start())
    assert models[0].numpy().tolist() == [0.5]


def test_a_checkpoint_without_a_loss_scale_is_refused(tmp_path: Path) -> None:
    import tensorflow as tf

    path = tf.train.Checkpoint(weight=tf.Variable(tf.constant(1.0))).write(str(tmp_path / "plain"))
    with pytest.raises(ValueError, match=r"tf-keras loss scale .*current_loss_scale"):
        read_tf_checkpoint(path)
