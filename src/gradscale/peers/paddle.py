"""Paddle: `paddle.amp.GradScaler` and the `AmpScaler` under it."""

from gradscale.peers._ladder import Ladder
from gradscale.peers._peer import Peer
from gradscale.policy import NoScaling, Static


def grad_scaler(
    enable: bool = True,
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    use_dynamic_loss_scaling: bool = True,
) -> Ladder | Static | NoScaling:
    """Returns the rule of `GradScaler`: float32, no bound, `decr_every_n_nan_or_inf` overflows in a row to back off."""
    if not enable:
        return NoScaling()
    if not use_dynamic_loss_scaling:
        return Static(init_loss_scaling)
    return Ladder(
        init_scale=init_loss_scaling,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        hysteresis=decr_every_n_nan_or_inf,
        refill="clean or backoff",
    )


def amp_scaler(
    enable: bool = True,
    init_loss_scaling: float = 2.0**15,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 1,
    use_dynamic_loss_scaling: bool = True,
) -> Ladder | Static | NoScaling:
    """Returns the rule of `AmpScaler`: that of `GradScaler` with defaults of its own."""
    return grad_scaler(
        enable,
        init_loss_scaling,
        incr_ratio,
        decr_ratio,
        incr_every_n_steps,
        decr_every_n_nan_or_inf,
        use_dynamic_loss_scaling,
    )


PEER = Peer(name="paddle", variants={"GradScaler": grad_scaler, "AmpScaler": amp_scaler})
