"""Loss scaling for Keras 3, on its TensorFlow, JAX and torch backends."""

# First: it refuses a Keras that is missing or too old, before other modules fail with an error that does not say so.
from gradscale.keras import compat  # noqa: F401

# isort: split
from gradscale.engine.health import ScaleStuck
from gradscale.keras import precision
from gradscale.keras.adopt import adopt, read_tf_checkpoint
from gradscale.keras.callback import ScaleMonitor
from gradscale.keras.explain import explain
from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.keras.remember import StepResult
from gradscale.keras.watch import Watch
from gradscale.recording.writer import Recorder

__all__ = [
    "LossScaleOptimizer",
    "Recorder",
    "ScaleMonitor",
    "ScaleStuck",
    "StepResult",
    "Watch",
    "adopt",
    "explain",
    "precision",
    "read_tf_checkpoint",
]
