"""Loss scaling for Keras 3, on its TensorFlow, JAX and torch backends."""

from gradscale.keras._installed import check_installed

check_installed()

# First: it refuses a Keras that is too old, before other modules fail on it with an error that does not say so.
from gradscale.keras import compat  # noqa: F401

# isort: split
from gradscale.engine.culprits import Culprit
from gradscale.engine.health import ScaleStuck
from gradscale.explain import LayerRow
from gradscale.keras import precision
from gradscale.keras.adopt import adopt, read_tf_checkpoint
from gradscale.keras.callback import ScaleMonitor, ScaleRow
from gradscale.keras.explain import Explanation, explain
from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.keras.remember import StepResult
from gradscale.keras.watch import Watch
from gradscale.recording.writer import Recorder
from gradscale.watching.rows import WatchRow

__all__ = [
    "Culprit",
    "Explanation",
    "LayerRow",
    "LossScaleOptimizer",
    "Recorder",
    "ScaleMonitor",
    "ScaleRow",
    "ScaleStuck",
    "StepResult",
    "Watch",
    "WatchRow",
    "adopt",
    "explain",
    "precision",
    "read_tf_checkpoint",
]
