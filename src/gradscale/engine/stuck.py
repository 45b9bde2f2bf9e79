"""The error for a run that skips every step: what was wrong, and where to look."""

from collections.abc import Sequence
from typing import Protocol

from gradscale.engine.result import Status
from gradscale.policies.contract import ScaleState

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


class Step(Protocol):
    """The last step, as the result of every adapter tells of it."""

    @property
    def status(self) -> Status:
        """What became of it."""
        ...

    def culprits(self) -> Sequence[Blamed]:
        """Returns the parameters whose gradients were not finite."""
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


def check_stuck(state: ScaleState, max_consecutive_skips: int, last: Step, parameters: int) -> None:
    """Raises if the last step was one skip too many: no lower scale is left to try, or the loss is not finite.

    Args:
        state: the state after the step.
        max_consecutive_skips: skipped steps in a row before a run is stuck.
        last: the last step.
        parameters: how many parameters had gradients.

    Raises:
        ScaleStuck: it names the parameters to blame, and the likely cause.
    """
    skips = int(state.consecutive_skips)
    if skips < max_consecutive_skips:
        return
    no_way_down = bool(state.stuck) and last.status is Status.OVERFLOW
    if no_way_down or last.status is Status.NONFINITE_LOSS:
        culprits = last.culprits()
        raise ScaleStuck(skips, float(state.scale), culprits, likely_cause(last.status, culprits, parameters))


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
