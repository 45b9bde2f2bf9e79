"""Loss scaling for MXNet's Gluon: the names of `mxnet.contrib.amp`, and a finite check before every update."""

from gradscale._extras import require

require(__name__, "mxnet", extra="mxnet")

from gradscale.engine.health import ScaleStuck
from gradscale.engine.result import StepResult
from gradscale.mxnet.scaler import LossScaler
from gradscale.mxnet.trainer import init_trainer, scale_loss, scaler_of, unscale

__all__ = [
    "LossScaler",
    "ScaleStuck",
    "StepResult",
    "init_trainer",
    "scale_loss",
    "scaler_of",
    "unscale",
]
