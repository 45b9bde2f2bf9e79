"""The likely cause of a run that skips every step, from its last step and the size of its weights."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status

HUGE = 30.0
"""Growth of the largest weight that is taken for a divergence; weights below 1 at the first step count as 1.

Weights start below 1 and end a healthy run below 10 in almost every network. One update at a learning rate that makes
the loss overflow multiplies them by a hundred or more."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How large the weights of a run are.

    Attributes:
        largest: largest magnitude now; inf or NaN if a weight is.
        name: the parameter that holds it.
        at_start: largest magnitude before the first step; None where it was not measured.
        learning_rate: the largest of the optimizers; None where it is not known.
    """

    largest: float
    name: str
    at_start: float | None = None
    learning_rate: float | None = None

    @classmethod
    def of(
        cls, sizes: Iterable[tuple[float, str]], at_start: float | None = None, learning_rate: float | None = None
    ) -> "Weights | None":
        """Returns those of parameters, given by their largest magnitude and name; None without one."""
        # A NaN is not larger than anything, and must be found all the same.
        found = max(sizes, key=lambda one: math.inf if math.isnan(one[0]) else one[0], default=None)
        return None if found is None else cls(*found, at_start, learning_rate)

    @property
    def diverged(self) -> bool:
        """Whether they are not finite, or far larger than at the first step."""
        at_start = 1.0 if self.at_start is None or math.isnan(self.at_start) else max(1.0, self.at_start)
        return not self.largest < HUGE * at_start

    def broken_after(self, applied: int) -> bool:
        """Returns whether they are the fault, after so many applied steps. Without one, only if they are not finite."""
        return self.diverged and (applied > 0 or not math.isfinite(self.largest))

    def as_cause(self) -> str:
        """Returns what made them diverge, as sentences."""
        if self.at_start is not None and not math.isfinite(self.at_start):
            return (
                f"the weights of {self.name} were inf or NaN before the first step; look at their initialization, or "
                "at the checkpoint they were loaded from."
            )
        rate = "" if self.learning_rate is None else f" ({self.learning_rate:g})"
        before = "" if self.at_start is None else f", and was {self.at_start:.3g} at the first step"
        return (
            f"the learning rate{rate} is too high. The largest weight, in {self.name}, is {self.largest:.3g}{before}: "
            "the updates made the weights diverge. Lower the learning rate or warm it up, and restart from a "
            "checkpoint with good weights."
        )


def likely_cause(
    status: Status,
    culprits: Sequence[Culprit],
    parameters: int,
    weights: Weights | None = None,
    applied: int = 0,
    scale: float = 1.0,
) -> str:
    """Returns why a run may be stuck, as a sentence, from its last step.

    Args:
        status: the status of the step.
        culprits: the parameters whose gradients were not finite.
        parameters: how many parameters had gradients; 0 where it was not recorded, as in Keras's `fit`.
        weights: how large the weights are; None where they are not known.
        applied: steps applied so far. Without one, no learning rate can be the cause.
        scale: the lowest scale that the policy can go to. Above 1 it may be the cause itself.
    """
    if weights is not None and weights.broken_after(applied):
        return weights.as_cause()
    if status is Status.NONFINITE_LOSS:
        rate = " If weights have become very large, the learning rate is too high." if applied and not weights else ""
        return (
            f"the loss itself is inf or NaN, so no scale can help; look at the forward pass and the input batch.{rate}"
        )
    if scale > 1:
        # Static, or a floor. That this scale is too high is as likely as that no scale would do.
        floor = number_text(scale).removesuffix(".0")
        otherwise = _overflow_cause(culprits, parameters)
        return f"the scale, {floor} at the lowest, may be too high: try a lower one. If that skips too, {otherwise}"
    return _overflow_cause(culprits, parameters)


def _overflow_cause(culprits: Sequence[Culprit], parameters: int) -> str:
    """Returns why gradients may overflow at any scale."""
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
