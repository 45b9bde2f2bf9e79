"""Remember: the result of a step."""

from dataclasses import dataclass
from typing import Any

from gradscale.engine import result as engine


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class StepResult(engine.StepResult):
    """The result of one `step`: that of every adapter, and the gradients. All values are plain numbers.

    Attributes:
        grads: the gradients to apply, unscaled and clipped, in the structure they came in; None if the step is skipped.
        factor: what they were multiplied by: unscaling and clipping in one number; 0 if the step is skipped.
    """

    grads: Any = None
    factor: float = 0.0
