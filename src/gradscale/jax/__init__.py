"""Loss scaling for JAX: pure functions and pytrees, compiled with the step."""

from gradscale._extras import require

require(__name__, "jax", "optax", extra="jax")

# First: it refuses a JAX that is too old, before other modules fail on it with an error that does not say so.
from gradscale.jax import compat  # noqa: F401

# isort: split
from gradscale.engine.health import ScaleStuck
from gradscale.engine.result import ScaleDesync
from gradscale.jax.apply import apply
from gradscale.jax.calibrate import calibrate
from gradscale.jax.optimizer import init
from gradscale.jax.remember import StepResult
from gradscale.jax.scaler import Scaler
from gradscale.jax.transformation import loss_scale, scaled
from gradscale.jax.value_and_grad import value_and_grad
from gradscale.jax.watch import Watch
from gradscale.recording.writer import Recorder

__all__ = [
    "Recorder",
    "ScaleDesync",
    "ScaleStuck",
    "Scaler",
    "StepResult",
    "Watch",
    "apply",
    "calibrate",
    "init",
    "loss_scale",
    "scaled",
    "value_and_grad",
]
