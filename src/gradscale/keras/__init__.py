"""Loss scaling for Keras 3, on its TensorFlow, JAX and torch backends."""

from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.keras.result import Culprit, StepResult

__all__ = ["Culprit", "LossScaleOptimizer", "StepResult"]
