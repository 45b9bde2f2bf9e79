"""How a run is doing: its condition, the likely cause of a fault, and the check for a run that skips every step."""

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status, StepResult
from gradscale.policies.checks import check_count

logger = logging.getLogger(__name__)

HUGE = 30.0
"""Growth of the largest weight that is taken for a divergence; weights below 1 at the first step count as 1.

Weights start below 1 and end a healthy run below 10 in almost every network. One update at a learning rate that makes
the loss overflow multiplies them by a hundred or more."""

CALIBRATION_STEPS = 20
"""Applied steps until the search for a first scale is over. Fewer say nothing about a rate either."""

THRASHING_RATE = 0.05
"""Share of skipped steps that is too high. A dynamic scale that finds its limit by crossing it skips 0.05%."""

UNDERFLOW_BITS = 16.0
"""Headroom at which the largest gradient, times the scale, is below 1: of FP16's 40 binades, 16 are not used, and
gradients that are 2**24 times smaller than the largest are zero."""

EVERY_S = 600.0
"""Seconds between two lines in the log about the same condition."""

MAX_CONSECUTIVE_SKIPS = 50
"""Default of the skips in a row, with no lower scale left to try, after which a run is stuck."""

INSIDE = ("gradscale.", "torch._dynamo.", "torch._compile")
"""Modules that are not the user's. torch calls a function that it shall not compile from a frame of its own."""


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


class Condition(StrEnum):
    """How a run is doing.

    Attributes:
        OK: steps are applied, and gradients fit the format.
        CALIBRATING: the scale is still being found. Skips are normal.
        THRASHING: too many steps are skipped, one by one.
        STUCK: every step overflows, and no lower scale is left; or no step has had a gradient.
        UNDERFLOWING: gradients are so small that many of them are zero.
        UNNEEDED: the backward pass runs in BF16, and needs no scale.
        FORWARD_OVERFLOW: the loss is inf or NaN, and the weights look sound.
        BROKEN: weights are inf, NaN, or have diverged.
    """

    OK = "ok"
    CALIBRATING = "calibrating"
    THRASHING = "thrashing"
    STUCK = "stuck"
    UNDERFLOWING = "underflowing"
    UNNEEDED = "unneeded"
    FORWARD_OVERFLOW = "forward_overflow"
    BROKEN = "broken"


HEALTHY = (Condition.OK, Condition.CALIBRATING)
"""Where nothing needs to be done."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What is known of a run, in host memory.

    Attributes:
        scale: the scale of the next loss.
        applied: steps applied so far.
        skipped: steps skipped so far.
        consecutive_skips: steps skipped since the last applied one.
        stuck: the last step overflowed, and the scale could not go lower.
        recent: steps applied and skipped since the last look, or since the start.
        status: of the last step; None before the first.
        headroom_bits: how often the scale could double before the largest gradient overflows; inf if all gradients are
            zero, NaN if it is not known.
        culprits: the parameters whose gradients were not finite in the last step.
        parameters: how many parameters had gradients in the last step; 0 where that is not known.
        without_gradients: parameters of the optimizers that had none.
        weights: how large the weights are; None where that is not known.
        in_bf16: the backward pass runs in BF16.
        scaling: whether the policy scales or checks at all.
        multiplies: whether it multiplies losses, and does not only check gradients.
    """

    scale: float
    applied: int
    skipped: int
    consecutive_skips: int = 0
    stuck: bool = False
    recent: tuple[int, int] = (0, 0)
    status: Status | None = None
    headroom_bits: float = math.nan
    culprits: Sequence[Culprit] = ()
    parameters: int = 0
    without_gradients: Sequence[str] = ()
    weights: Weights | None = None
    in_bf16: bool = False
    scaling: bool = True
    multiplies: bool = True

    @property
    def recent_rate(self) -> float:
        """Share of recent steps that were skipped; 0 where too few were taken to tell."""
        steps = sum(self.recent)
        return self.recent[1] / steps if steps >= CALIBRATION_STEPS else 0.0


@dataclass(frozen=True, slots=True)
class Health:
    """How a run is doing. As text it is one line.

    Attributes:
        condition: in a word.
        advice: what to do, in a sentence or two.
        applied: updates applied.
        steps: steps run.
        evidence: the numbers behind it, by name.
    """

    condition: Condition
    advice: str
    applied: int
    steps: int
    evidence: Mapping[str, float | str] = field(default_factory=dict[str, float | str])

    def __str__(self) -> str:
        return f"{self.condition}: {self.applied} updates in {self.steps} steps. {self.advice}"


def health_of(seen: Vitals) -> Health:
    """Returns how a run is doing. What is certain comes before what is likely, and a fault before a note."""
    condition = _condition(seen)
    return Health(condition, _advice(condition, seen), seen.applied, seen.applied + seen.skipped, _evidence(seen))


def _condition(seen: Vitals) -> Condition:
    if not seen.scaling or seen.status is None:
        return Condition.OK
    if seen.weights is not None and seen.weights.broken_after(seen.applied):
        return Condition.BROKEN
    if seen.status is Status.NONFINITE_LOSS:
        return Condition.FORWARD_OVERFLOW
    never_stepped = seen.status is Status.NO_GRADS and not seen.applied
    if never_stepped or (seen.stuck and seen.consecutive_skips > 1):
        return Condition.STUCK
    if seen.in_bf16 and seen.multiplies:
        return Condition.UNNEEDED
    if seen.multiplies and seen.skipped and (seen.applied < CALIBRATION_STEPS or seen.consecutive_skips > 1):
        return Condition.CALIBRATING
    if seen.recent_rate > THRASHING_RATE:
        return Condition.THRASHING
    if seen.multiplies and seen.headroom_bits > UNDERFLOW_BITS:
        return Condition.UNDERFLOWING
    return Condition.OK


def _advice(condition: Condition, seen: Vitals) -> str:
    """Returns what to do, in a sentence or two."""
    scale, rate = number_text(seen.scale).removesuffix(".0"), f"{seen.recent_rate:.0%} of the steps are skipped."
    if condition is Condition.STUCK and seen.status is Status.NO_GRADS:
        return (
            "No parameter of the optimizer has a gradient. Look whether it was built with the parameters of this "
            "model, after they were last replaced, and whether they require gradients."
        )
    if condition in (Condition.BROKEN, Condition.FORWARD_OVERFLOW, Condition.STUCK):
        status = Status.APPLIED if seen.status is None else seen.status
        cause = likely_cause(status, seen.culprits, seen.parameters, seen.weights, seen.applied, seen.scale)
        return f"Likely cause: {cause}"
    if condition is Condition.UNDERFLOWING and math.isinf(seen.headroom_bits):
        return (
            f"All gradients are zero at a scale of {scale}: they underflow, or the loss does not use the weights. "
            "Raise the scale, or compare with a step in float32."
        )
    if condition is Condition.UNDERFLOWING:
        return (
            f"The largest gradient could be 2**{seen.headroom_bits:.0f} times larger, so that small ones are zero in "
            f"FP16. Raise the scale above {scale}: use `Headroom()`, a higher `init_scale` or `max_scale`, or a larger "
            "weight of the loss."
        )
    if condition is Condition.CALIBRATING:
        return "The scale is still being found. To lose no batch, use `backward(loss, retries=8)`."
    if condition is Condition.UNNEEDED:
        return "The backward pass runs in BF16, which needs no scale: use `NoScaling()`."
    if condition is Condition.THRASHING and not seen.multiplies:
        return f"{rate} No scale is the cause: look at the culprits of a skipped step and at its batch, or probe it."
    if condition is Condition.THRASHING:
        return (
            f"{rate} Use `Headroom()`, or a larger margin or interval, and look at the culprits of a skipped step, or "
            "probe it: one module may overflow alone."
        )
    if seen.status is None:
        return "No step was taken yet."
    if not seen.scaling:
        return "The policy does not scale, and checks nothing."
    if missing := seen.without_gradients:
        named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        return f"{len(missing)} parameters had no gradient, as frozen or unused ones have none: {named}."
    return "Nothing to do."


def _evidence(seen: Vitals) -> dict[str, float | str]:
    """Returns the numbers that are known."""
    found: dict[str, float | str] = {
        "scale": seen.scale,
        "applied": seen.applied,
        "skipped": seen.skipped,
        "consecutive_skips": seen.consecutive_skips,
        "recent_steps": sum(seen.recent),
        "recent_skipped": seen.recent[1],
        "headroom_bits": seen.headroom_bits,
        "status": "" if seen.status is None else seen.status.value,
        "parameters": seen.parameters,
        "parameters_without_gradient": len(seen.without_gradients),
        "culprits": ", ".join(f"{one.name} ({one.kind})" for one in seen.culprits[:5]),
    }
    if seen.weights is not None:
        found |= {"largest_weight": seen.weights.largest, "largest_weight_name": seen.weights.name}
        if seen.weights.at_start is not None:
            found["largest_weight_at_start"] = seen.weights.at_start
    return {name: value for name, value in found.items() if value == value and value != ""}


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


class HealthLog:
    """Logs the health of a run once when its condition changes, and again after `EVERY_S` if it is not healthy."""

    def __init__(self) -> None:
        self._logged = Condition.OK
        self._at_s = -EVERY_S

    def note(self, health: Health) -> None:
        """Logs a line about `health`, unless it would repeat the last one."""
        healthy = health.condition in HEALTHY
        due = not healthy and time.monotonic() - self._at_s >= EVERY_S
        if health.condition is self._logged and not due:
            return
        self._logged, self._at_s = health.condition, time.monotonic()
        logger.log(logging.INFO if healthy else logging.WARNING, "%s", health)


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

    Attributes:
        reported: whether the present row of skipped steps was reported. Set it to False when a step is applied.
    """

    def __init__(self, max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS, on_stuck: OnStuck = "raise") -> None:
        check_count("max_consecutive_skips", max_consecutive_skips)
        if on_stuck not in ("raise", "warn", "ignore") and not callable(on_stuck):
            raise ValueError(
                f"`on_stuck` must be 'raise', 'warn', 'ignore' or a function. Received: on_stuck={on_stuck!r}."
            )
        self.max_consecutive_skips = max_consecutive_skips
        self.on_stuck: OnStuck = on_stuck
        self.reported = False

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
            self.reported = False
            return
        reported = self.on_stuck == "ignore" or (self.reported and self.on_stuck != "raise")
        if last.attempted and (progress.stuck or not progress.loss_finite) and not reported:
            culprits, scale, status = last.culprits(), float(last.next_scale), Status.of(False, progress.loss_finite)
            sizes = None if weights is None else weights()
            cause = likely_cause(status, culprits, last.parameters, sizes, progress.applied, scale)
            error = ScaleStuck(progress, scale, culprits, cause)
            self.reported = True
            if self.on_stuck == "raise":
                raise error
            if self.on_stuck == "warn":
                warnings.warn(str(error), stacklevel=callers_level())
            elif callable(self.on_stuck):
                self.on_stuck(error)


def callers_level() -> int:
    """Returns the `stacklevel` at which a warning points at the user's line that called the library."""
    # Not a constant: the number of frames in between differs from one adapter to the next.
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level
