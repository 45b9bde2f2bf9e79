"""Loss scaling for MXNet's Gluon: the names of `mxnet.contrib.amp`, and a check that comes before every update."""

from gradscale.engine.stuck import ScaleStuck
from gradscale.mxnet.result import StepResult
from gradscale.mxnet.scaler import LossScaler
from gradscale.mxnet.trainer import init_trainer, scale_loss, scaler_of, unscale
from gradscale.numpy.result import Culprit

__all__ = [
    "Culprit",
    "LossScaler",
    "ScaleStuck",
    "StepResult",
    "init_trainer",
    "scale_loss",
    "scaler_of",
    "unscale",
]
