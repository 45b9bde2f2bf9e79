"""What a step returns: whether it was applied, the gradients to apply, and who was to blame if it was not."""

from dataclasses import dataclass
from typing import Any, Literal

from gradscale.engine.result import Status


@dataclass(frozen=True, slots=True)
class Culprit:
    """An array that was not finite.

    Attributes:
        name: its path in the structure of gradients, as in `encoder.0.weight`.
        infs: elements that were infinite, or became so when the scale was divided out.
        nans: elements that were NaN.
    """

    name: str
    infs: int
    nans: int

    @property
    def kind(self) -> Literal["inf", "nan"]:
        """`"nan"` if the array held a NaN, else `"inf"`."""
        return "nan" if self.nans else "inf"

    @property
    def count(self) -> int:
        """Elements that were not finite."""
        return self.infs + self.nans


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one `step`. All values are in true units: unscaled.

    Attributes:
        status: what became of the step, and why.
        grads: the gradients to apply, unscaled and clipped, in the structure they came in; None if the step is skipped.
        factor: what they were multiplied by: unscaling and clipping in one number; 0 if the step is skipped.
        scale: the scale that made the gradients.
        next_scale: the scale of the next step.
        grad_norm: norm of all gradients before clipping; None unless `clip_norm` or `norm=True` was given.
        amax: largest magnitude among the finite elements; None if the policy needed no look at the gradients.
        culprits: the arrays that were not finite.
    """

    status: Status
    grads: Any
    factor: float
    scale: float
    next_scale: float
    grad_norm: float | None
    amax: float | None
    culprits: tuple[Culprit, ...]

    @property
    def applied(self) -> bool:
        """Whether `grads` are there to be applied."""
        return self.status is Status.APPLIED
