"""jmp: `NoOpLossScale`, `StaticLossScale` and `DynamicLossScale`."""

from gradscale.peers._ladder import Ladder
from gradscale.peers._peer import Peer
from gradscale.policy import NoScaling, Static


def dynamic_loss_scale(
    loss_scale: float, counter: int = 0, period: int = 2000, factor: float = 2, min_loss_scale: float = 1.0
) -> Ladder:
    """Returns the rule of `DynamicLossScale` outside `jax.jit`."""
    return Ladder(
        init_scale=loss_scale,
        growth_factor=factor,
        backoff_factor=1.0,
        backoff_divisor=factor,
        growth_interval=period,
        floor=min_loss_scale,
        refuses_inf=True,
        init_clean_steps=_counted(counter, period),
    )


def jitted_dynamic_loss_scale(
    loss_scale: float, counter: int = 0, period: int = 2000, factor: float = 2, min_loss_scale: float = 1.0
) -> Ladder:
    """Returns the rule of `DynamicLossScale` inside `jax.jit`, which loses `min_loss_scale`: it becomes 1."""
    del min_loss_scale
    return dynamic_loss_scale(loss_scale, counter, period, factor)


def _counted(counter: int, period: int) -> int:
    """Returns the clean steps that `counter` stands for. One past the period wraps round without growing the scale."""
    return counter if counter < period else (counter + 1) % period - 1


PEER = Peer(
    name="jmp",
    variants={
        "DynamicLossScale": dynamic_loss_scale,
        "DynamicLossScale (jit)": jitted_dynamic_loss_scale,
        "StaticLossScale": Static,
        "NoOpLossScale": NoScaling,
    },
)
