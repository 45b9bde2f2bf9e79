"""What a step leaves behind: whether it was applied, and who was to blame if it was not."""

from dataclasses import dataclass

from gradscale.engine.result import Status
from gradscale.numpy.result import Culprit
from gradscale.policies.contract import ScaleState


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one `trainer.step` or `trainer.update`. Plain numbers: MXNet reads its flag to the host anyway.

    Attributes:
        status: what became of the step, and why.
        scale: the scale that made the gradients.
        next_scale: the scale of the next step.
        grad_norm: the norm of all gradients as the optimizer sees them, before clipping: unscaled, and divided by the
            size of the batch. None if nothing was measured.
        amax: the largest magnitude of any gradient, unscaled; None unless the policy needs it.
        bad: the parameters whose gradients were not finite.
    """

    status: Status
    scale: float
    next_scale: float
    grad_norm: float | None
    amax: float | None
    bad: tuple[Culprit, ...]

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        return self.status is Status.APPLIED

    def skipped(self) -> bool:
        """Returns whether the weights were left alone."""
        return not self.applied

    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in the trainer's order."""
        return list(self.bad)


@dataclass(frozen=True, slots=True)
class Decision:
    """What shall become of a step, before it has: an update that fails must leave no trace.

    Attributes:
        result: what the step will leave behind.
        state: the scale's state for the next step.
        factor: what the optimizer shall multiply the gradients by; 0 if it shall leave the weights alone.
    """

    result: StepResult
    state: ScaleState
    factor: float
