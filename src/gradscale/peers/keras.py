"""Keras 3: `keras.optimizers.LossScaleOptimizer`."""

from gradscale.peers._ladder import Ladder
from gradscale.peers._peer import Peer


def loss_scale_optimizer(initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000) -> Ladder:
    """Returns the rule of `LossScaleOptimizer`: doubles and halves in float32, with no bound and no guard.

    At the top the scale becomes infinity and stays there for ever, as it does in Keras.
    """
    return Ladder(init_scale=initial_scale, growth_interval=dynamic_growth_steps)


PEER = Peer(name="keras", variants={"LossScaleOptimizer": loss_scale_optimizer})
