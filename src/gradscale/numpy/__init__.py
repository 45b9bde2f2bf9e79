"""Loss scaling for numpy: the reference adapter, written to be read. The other adapters are tested against it.

A step goes through five stages: measure, agree, decide, apply, remember. Modules have their names. `scaler` calls them
in order. What needs no kernel, such as the decision, is the engine's (`gradscale.engine.host_scaler`).
"""

from gradscale.engine.health import ScaleStuck
from gradscale.numpy.remember import StepResult
from gradscale.numpy.scaler import LossScaler

__all__ = ["LossScaler", "ScaleStuck", "StepResult"]
