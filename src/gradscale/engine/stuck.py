"""The check for a run that skips every step, and the error that names the likely cause."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit
from gradscale.engine.diagnosis import Weights, likely_cause
from gradscale.engine.result import Status, StepResult
from gradscale.policies.checks import check_count

MAX_CONSECUTIVE_SKIPS = 50
"""Default of the skips in a row, with no lower scale left to try, after which a run is stuck."""


INSIDE = ("gradscale.", "torch._dynamo.", "torch._compile")
"""Modules that are not the user's. torch calls a function that it shall not compile from a frame of its own."""


class Progress(NamedTuple):
    """Where a run stands after a step, in host memory.

    Attributes:
        applied: steps applied so far.
        skipped: steps skipped so far.
        consecutive_skips: steps skipped since the last applied one.
        stuck: the last step overflowed, and the scale could not go lower.
        loss_finite: whether the loss of the last step was finite.
        last_finite_loss: the last step whose loss was finite, counted from 1; None if none is known.
    """

    applied: int
    skipped: int
    consecutive_skips: int
    stuck: bool
    loss_finite: bool = True
    last_finite_loss: int | None = None

    @classmethod
    def of(cls, state: Any, loss_finite: bool, last_finite_loss: int | None = None) -> "Progress":
        """Returns that of a `ScaleState`. Synchronizes with the device that holds it."""
        counts = int(state.applied), int(state.skipped), int(state.consecutive_skips)
        return cls(*counts, bool(state.stuck), loss_finite, last_finite_loss)


class ScaleStuck(RuntimeError):
    """Raised when step after step is skipped and no lower scale is left to try.

    Attributes:
        culprits: the parameters whose gradients were not finite in the last step.
        cause: the likely cause, in a sentence.
    """

    def __init__(self, progress: Progress, scale: float, culprits: Sequence[Culprit], cause: str) -> None:
        self.culprits = list(culprits)
        self.cause = cause
        named = ", ".join(f"{culprit.name} ({culprit.kind})" for culprit in culprits[:5])
        more = f" and {len(culprits) - 5} more" if len(culprits) > 5 else ""
        listed = f" Gradients that were not finite: {named}{more}." if culprits else ""
        super().__init__(f"{_finding(progress, scale)} Likely cause: {cause}{listed}")


def _finding(progress: Progress, scale: float) -> str:
    """Returns what was found, as a sentence, with the numbers of steps, counted from 1."""
    skips = progress.consecutive_skips
    found = f"{skips} steps in a row were skipped"
    if not progress.loss_finite and progress.last_finite_loss is not None:
        return f"{found}, and the loss is inf or NaN since step {progress.last_finite_loss + 1}."
    first = progress.applied + progress.skipped - skips + 1
    found += ", every step so far" if first == 1 else f", since step {first}"
    if not progress.loss_finite:
        return f"{found}, and the loss is inf or NaN."
    lowest = number_text(scale).removesuffix(".0")
    if scale > 1:
        return f"{found}, and the policy has no scale below {lowest}."
    return f"{found}, and no lower scale than {lowest} can help."


OnStuck = Literal["raise", "warn", "ignore"] | Callable[[ScaleStuck], None]
"""What to do about a stuck run: nothing; raise at every step; or once until a step is applied: warn, or call."""


class StuckCheck:
    """Detects a run whose every step is skipped: no lower scale is left to try, or the loss is not finite.

    Args:
        max_consecutive_skips: skipped steps in a row before a run is stuck.
        on_stuck: what to do then.
    """

    def __init__(self, max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS, on_stuck: OnStuck = "raise") -> None:
        check_count("max_consecutive_skips", max_consecutive_skips)
        if on_stuck not in ("raise", "warn", "ignore") and not callable(on_stuck):
            raise ValueError(
                f"`on_stuck` must be 'raise', 'warn', 'ignore' or a function. Received: on_stuck={on_stuck!r}."
            )
        self.max_consecutive_skips = max_consecutive_skips
        self.on_stuck: OnStuck = on_stuck
        self.forget()

    def forget(self) -> None:
        """Forgets that a stuck run was reported, so that the next one is."""
        self._reported = False

    def check(self, progress: Progress, last: StepResult, weights: Callable[[], Weights | None] | None = None) -> None:
        """Raises, warns or calls if the run is stuck. Synchronizes with the device only if it is.

        Args:
            progress: where the run stood after a step.
            last: the result of the last step, which on a device is a few steps later.
            weights: measures the weights; called only for a report.

        Raises:
            ScaleStuck: the run is stuck, and `on_stuck` is `"raise"`.
        """
        # Skips alone are not enough: from a high initial scale a run may skip many steps and still find its scale.
        if progress.consecutive_skips < self.max_consecutive_skips:
            self._reported = False
        elif last.attempted and (progress.stuck or not progress.loss_finite) and not self._is_reported:
            error = diagnosis(progress, last, None if weights is None else weights())
            self._reported = True
            if self.on_stuck == "raise":
                raise error
            if self.on_stuck == "warn":
                warnings.warn(str(error), stacklevel=callers_level())
            elif callable(self.on_stuck):
                self.on_stuck(error)

    @property
    def _is_reported(self) -> bool:
        return self.on_stuck == "ignore" or (self._reported and self.on_stuck != "raise")


def diagnosis(progress: Progress, last: StepResult, weights: Weights | None) -> ScaleStuck:
    """Returns the error that describes a stuck run from its last step. Synchronizes with the device."""
    culprits = last.culprits()
    status = Status.of(False, progress.loss_finite)
    scale = float(last.next_scale)
    cause = likely_cause(status, culprits, last.parameters, weights, progress.applied, scale)
    return ScaleStuck(progress, scale, culprits, cause)


def callers_level() -> int:
    """Returns the `stacklevel` at which a warning points at the user's line that called the library."""
    # Not a constant: the number of frames in between differs from one adapter to the next.
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level
