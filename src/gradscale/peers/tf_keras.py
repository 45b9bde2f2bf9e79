"""tf-keras `mixed_precision.LossScaleOptimizer`, and the TF1 loss scales it grew out of."""

from gradscale.peers._ladder import Ladder
from gradscale.peers._peer import Peer
from gradscale.policy import Static


def loss_scale_optimizer(
    dynamic: bool = True, initial_scale: float | None = None, dynamic_growth_steps: int | None = None
) -> Ladder | Static:
    """Returns the rule of `LossScaleOptimizer`."""
    if dynamic:
        return dynamic_loss_scale(
            2.0**15 if initial_scale is None else initial_scale,
            2000 if dynamic_growth_steps is None else dynamic_growth_steps,
        )
    if initial_scale is None or dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic=False` takes `initial_scale`, the scale, and no `dynamic_growth_steps`. Received: "
            f"initial_scale={initial_scale!r}, dynamic_growth_steps={dynamic_growth_steps!r}."
        )
    return Static(initial_scale)


def dynamic_loss_scale(
    initial_loss_scale: float = 2.0**15, increment_period: int = 2000, multiplier: float = 2.0
) -> Ladder:
    """Returns the rule of TF1's `DynamicLossScale`: float32, divided down to 1, never grown to infinity."""
    return Ladder(
        init_scale=float(initial_loss_scale),
        growth_factor=float(multiplier),
        backoff_factor=1.0,
        backoff_divisor=float(multiplier),
        growth_interval=int(increment_period),
        overshoot=True,
        floor=1.0,
        refuses_inf=True,
    )


def fixed_loss_scale(loss_scale_value: float) -> Static:
    """Returns the rule of TF1's `FixedLossScale`."""
    return Static(loss_scale_value)


PEER = Peer(
    name="tf-keras",
    variants={
        "LossScaleOptimizer": loss_scale_optimizer,
        "DynamicLossScale": dynamic_loss_scale,
        "FixedLossScale": fixed_loss_scale,
    },
)
