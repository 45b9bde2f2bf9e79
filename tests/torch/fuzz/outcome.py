"""What an operation gave: the same values from gradscale and from the reference, to be compared."""

from dataclasses import dataclass

from gradscale.engine.result import Status


class Undefined(Exception):
    """Raised by the reference for an order of operations that has no defined result, and is never drawn."""


class TorchRaises(Undefined):
    """Raised by the reference where torch's own optimizer raises: the program ends there."""


@dataclass(frozen=True)
class Refused:
    """The call was refused with an error, and nothing was changed."""

    error: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refused)

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True)
class Bad:
    """A gradient that was not finite. `count` is None where it is not promised."""

    name: str
    kind: str
    count: int | None


@dataclass(frozen=True)
class Outcome:
    """The result of a step.

    Attributes:
        status: applied, or why it was skipped.
        scale: the scale that made the gradients.
        next_scale: the scale of the next step.
        norm: the norm of the unscaled gradients; None where it was not asked for.
        amax: their largest magnitude; None where it was not read.
        retries: how often a backward pass was run again.
        culprits: the gradients that were not finite; None where the reference does not know which are named.
    """

    status: Status
    scale: float
    next_scale: float
    norm: float | None
    amax: float | None
    retries: int
    culprits: tuple[Bad, ...] | None


Result = Outcome | Refused | tuple | None
"""What an operation gives: a step its outcome, `scaler.grad` the gradients, others nothing."""
