"""OpenSeq2Seq: `BackoffScaler` and `LogMaxScaler`."""

from gradscale.peers._ladder import Ladder
from gradscale.peers._peer import Peer


def backoff_scaler(
    scale_min: float = 1.0, scale_max: float = 2.0**14, step_factor: float = 2.0, step_window: int = 2000
) -> Ladder:
    """Returns the rule of `BackoffScaler`: float32, within its bounds, starting from the upper one."""
    return Ladder(
        init_scale=scale_max,
        growth_factor=step_factor,
        backoff_factor=1.0,
        backoff_divisor=step_factor,
        growth_interval=step_window,
        floor=scale_min,
        ceiling=scale_max,
    )


PEER = Peer(name="openseq2seq", variants={"BackoffScaler": backoff_scaler})
