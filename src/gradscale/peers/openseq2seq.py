"""OpenSeq2Seq: `BackoffScaler` and `LogMaxScaler`."""

import numpy as np

from gradscale.peers._ladder import Ladder
from gradscale.peers._logmax import LogMaxScaler
from gradscale.peers._peer import Peer


def backoff_scaler(
    scale_min: float = 1.0, scale_max: float = 2.0**14, step_factor: float = 2.0, step_window: int = 2000
) -> Ladder:
    """Returns the rule of `BackoffScaler`: float32, within its bounds, starting from the upper one."""
    return Ladder(
        init_scale=scale_max,
        growth_factor=step_factor,
        backoff_factor=float(np.float32(1) / np.float32(step_factor)),
        growth_interval=step_window,
        floor=scale_min,
        ceiling=scale_max,
    )


def log_max_scaler(
    scale_min: float = 1.0,
    scale_max: float = 2.0**14,
    log_max: float = 16.0,
    beta1: float = 0.99,
    beta2: float = 0.999,
    overflow_std_dev: float = 3.09,
) -> LogMaxScaler:
    """Returns the rule of `LogMaxScaler`."""
    return LogMaxScaler.build(scale_min, scale_max, log_max, beta1, beta2, overflow_std_dev)


PEER = Peer(name="openseq2seq", variants={"BackoffScaler": backoff_scaler, "LogMaxScaler": log_max_scaler})
