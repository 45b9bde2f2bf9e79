"""The error for a run that skips every step: what was wrong, and where to look."""

from collections.abc import Sequence
from typing import Protocol

from gradscale.state import Status

MAX_CONSECUTIVE_SKIPS = 50
"""Skips in a row, with no lower scale left to try, after which a run is stuck, unless said otherwise."""


class Blamed(Protocol):
    """A parameter whose gradient was not finite, as every adapter names it."""

    @property
    def name(self) -> str:
        """What the parameter is called."""
        ...

    @property
    def kind(self) -> str:
        """`"nan"` or `"inf"`."""
        ...


class ScaleStuck(RuntimeError):
    """Raised when step after step is skipped and no lower scale is left to try.

    Attributes:
        culprits: the parameters whose gradients were not finite in the last step.
        cause: the likely cause, in a sentence.
    """

    def __init__(self, skips: int, scale: float, culprits: Sequence[Blamed], cause: str) -> None:
        self.culprits = list(culprits)
        self.cause = cause
        named = ", ".join(f"{culprit.name} ({culprit.kind})" for culprit in culprits[:5])
        more = f" and {len(culprits) - 5} more" if len(culprits) > 5 else ""
        super().__init__(
            f"{skips} steps in a row were skipped, and no lower scale than {scale:g} can help. Likely cause: {cause} "
            f"Gradients that were not finite: {named or 'none known'}{more}."
        )


def likely_cause(status: Status, culprits: Sequence[Blamed], parameters: int) -> str:
    """Returns why a run may be stuck, from its last step: a sentence that says where to look.

    Args:
        status: what became of the step.
        culprits: the parameters whose gradients were not finite.
        parameters: how many parameters had gradients.
    """
    if status is Status.NONFINITE_LOSS:
        return "the loss itself is inf or NaN, so no scale can help; look at the forward pass and the input batch."
    if not culprits:
        return (
            "gradients overflowed that the step did not read: those of `scaler.grad`, another rank's, or FP16 ones "
            "that only overflow once they are divided by a scale below 1."
        )
    if len(culprits) == 1:
        return f"one parameter, {culprits[0].name!r}, overflows at any scale; keep its module in float32."
    if len(culprits) == parameters:
        return (
            "every gradient is inf or NaN although the loss is finite; look for a division by zero, a sqrt or a norm "
            "at zero in the backward pass, and for gradients left over because they were not cleared."
        )
    return "part of the model overflows at any scale; keep the modules of these parameters in float32."
