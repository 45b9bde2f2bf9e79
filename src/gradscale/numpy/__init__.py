"""Loss scaling for numpy: the reference adapter, written to be read. The other adapters are tested against it."""

from gradscale.numpy.result import Culprit, StepResult
from gradscale.numpy.scaler import LossScaler

__all__ = ["Culprit", "LossScaler", "StepResult"]
