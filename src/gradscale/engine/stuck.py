"""The check for a run that skips every step, and the error that names the likely cause."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status, StepResult
from gradscale.policies.checks import check_count

MAX_CONSECUTIVE_SKIPS = 50
"""Default of the skips in a row, with no lower scale left to try, after which a run is stuck."""


class ScaleStuck(RuntimeError):
    """Raised when step after step is skipped and no lower scale is left to try.

    Attributes:
        culprits: the parameters whose gradients were not finite in the last step.
        cause: the likely cause, in a sentence.
    """

    def __init__(self, skips: int, scale: float, culprits: Sequence[Culprit], cause: str) -> None:
        self.culprits = list(culprits)
        self.cause = cause
        named = ", ".join(f"{culprit.name} ({culprit.kind})" for culprit in culprits[:5])
        more = f" and {len(culprits) - 5} more" if len(culprits) > 5 else ""
        super().__init__(
            f"{skips} steps in a row were skipped, and no lower scale than {scale:g} can help. Likely cause: {cause} "
            f"Gradients that were not finite: {named or 'none known'}{more}."
        )


OnStuck = Literal["raise", "warn"] | Callable[[ScaleStuck], None]
"""What to do about a stuck run: raise at every step, or once until a step is applied: warn, or call a function."""


class StuckCheck:
    """Detects a run whose every step is skipped: no lower scale is left to try, or the loss is not finite.

    Args:
        max_consecutive_skips: skipped steps in a row before a run is stuck.
        on_stuck: what to do then.
    """

    def __init__(self, max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS, on_stuck: OnStuck = "raise") -> None:
        check_count("max_consecutive_skips", max_consecutive_skips)
        if on_stuck not in ("raise", "warn") and not callable(on_stuck):
            raise ValueError(f"`on_stuck` must be 'raise', 'warn' or a function. Received: on_stuck={on_stuck!r}.")
        self.max_consecutive_skips = max_consecutive_skips
        self.on_stuck: OnStuck = on_stuck
        self.forget()

    def forget(self) -> None:
        """Forgets that a stuck run was reported, so that the next one is."""
        self._reported = False

    def check(self, consecutive_skips: int, stuck: bool, loss_finite: bool, last: StepResult) -> None:
        """Raises, warns or calls if the run is stuck. Synchronizes with the device only if it is.

        `consecutive_skips` and `stuck` are those of the state; `loss_finite` and `last` are of the last step.

        Raises:
            ScaleStuck: the run is stuck, and `on_stuck` is `"raise"`.
        """
        # Skips alone are not enough: from a high initial scale a run may skip many steps and still find its scale.
        if consecutive_skips < self.max_consecutive_skips:
            self._reported = False
        elif last.attempted and (stuck or not loss_finite):
            self._report(consecutive_skips, last)

    def _report(self, skips: int, last: StepResult) -> None:
        if self.on_stuck == "raise":
            raise diagnosis(skips, last)
        if self._reported:
            return
        self._reported = True
        if self.on_stuck == "warn":
            warnings.warn(str(diagnosis(skips, last)), stacklevel=_callers_level())
        elif callable(self.on_stuck):
            self.on_stuck(diagnosis(skips, last))


def diagnosis(skips: int, last: StepResult) -> ScaleStuck:
    """Returns the error that describes a stuck run from its last step. Synchronizes with the device."""
    culprits = last.culprits()
    cause = likely_cause(last.status(), culprits, last.parameters)
    return ScaleStuck(skips, float(last.next_scale), culprits, cause)


def _callers_level() -> int:
    """Returns the `stacklevel` at which a warning points at the user's line that called the library."""
    # Not a constant: the number of frames in between differs from one adapter to the next.
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gradscale."):
        frame, level = frame.f_back, level + 1
    return level


def likely_cause(status: Status, culprits: Sequence[Culprit], parameters: int) -> str:
    """Returns why a run may be stuck, as a sentence, from its last step.

    `parameters` is how many parameters had gradients; 0 where it was not recorded, as in Keras's `fit`.
    """
    if status is Status.NONFINITE_LOSS:
        return "the loss itself is inf or NaN, so no scale can help; look at the forward pass and the input batch."
    if not parameters:
        return (
            "gradients overflow at any scale, and the step did not record which; run one with a batch of this run in a "
            "custom loop, and look at its culprits."
        )
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
