"""How a run is doing: one table of evidence, the findings that follow from it, and the check for a stuck run."""

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status, StepResult
from gradscale.formats import FP16
from gradscale.policies.checks import check_count

logger = logging.getLogger(__name__)
# `health()` returns what it logs: where no logging is set up, Python would print it a second time.
logger.addHandler(logging.NullHandler())

HUGE = 30.0
"""Growth of the largest weight that is taken for a divergence; weights below 1 at the first step count as 1.

Weights start below 1 and end a healthy run below 10 in almost every network. One update at a learning rate that makes
the loss overflow multiplies them by a hundred or more."""

GROWN, RISEN = 3.0, 0.25
"""Growth of the weights, and rise of the loss, that together are a divergence. Neither is one alone."""

CALIBRATION_STEPS = 20
"""Applied steps until the search for a first scale is over. Fewer say nothing about a rate either."""

CALIBRATION_ROWS = 2
"""Separate rows of skipped steps in that search: `Dynamic` has one, and `Headroom` may have another after its jump."""

THRASHING_RATE = 0.05
"""Share of skipped steps that is too high. A dynamic scale that finds its limit by crossing it skips 0.05%."""

UNDERFLOW_BITS = 16.0
"""Headroom at which the largest gradient, times the scale, is below 1: of FP16's 40 binades, 16 are not used, and
gradients that are 2**24 times smaller than the largest are zero."""

EXACT_ZERO = 2.0**40
"""Scale at which gradients that are all zero are taken to be so without a scale: 2**-64 would be seen in FP16."""

LOST_SHARE = 0.05
"""Share of one gradient that is zero at the scale, and not in float32, which is reported."""

EVERY_S = 600.0
"""Seconds between two lines in the log about the same condition."""

MAX_CONSECUTIVE_SKIPS = 50
"""Default of the skips in a row, with no lower scale left to try, after which a run is stuck."""

INSIDE = ("gradscale.", "torch._dynamo.", "torch._compile")
"""Modules that are not the user's. torch calls a function that it shall not compile from a frame of its own."""


class Condition(StrEnum):
    """How a run is doing.

    Attributes:
        OK: steps are applied, and gradients fit the format.
        CALIBRATING: the scale is still being found. Skips are normal.
        THRASHING: too many steps overflow, one by one.
        STUCK: every step overflows, and no lower scale is left; or no step has had a gradient.
        UNDERFLOWING: gradients are so small that many of them are zero.
        ZERO_GRADIENTS: all gradients are zero, without a scale too.
        UNNEEDED: the backward pass runs in BF16, and needs no scale.
        SCALED_TWICE: the loss is multiplied by a scale before the scaler multiplies it.
        NONFINITE_LOSS: the loss is or was inf or NaN, and the weights look sound.
        DIVERGING: the loss and the weights grow.
        BROKEN: weights or optimizer state are inf or NaN, or weights have diverged.
    """

    OK = "ok"
    CALIBRATING = "calibrating"
    THRASHING = "thrashing"
    STUCK = "stuck"
    UNDERFLOWING = "underflowing"
    ZERO_GRADIENTS = "zero_gradients"
    UNNEEDED = "unneeded"
    SCALED_TWICE = "scaled_twice"
    NONFINITE_LOSS = "nonfinite_loss"
    DIVERGING = "diverging"
    BROKEN = "broken"


HEALTHY = (Condition.OK, Condition.CALIBRATING)
"""Where nothing needs to be done."""


class Finding(NamedTuple):
    """What follows from the evidence. As text, what is known comes before what is suspected and what to do.

    Attributes:
        condition: in a word.
        known: what was seen, in sentences.
        suspected: the likely cause, without a capital and a full stop; empty where the evidence shows none.
        do: what to do, in sentences.
    """

    condition: Condition
    known: str = ""
    suspected: str = ""
    do: str = ""

    def __str__(self) -> str:
        suspected = f"Likely cause: {self.suspected}." if self.suspected else ""
        return " ".join(filter(None, (self.known, suspected, self.do)))


@dataclass(frozen=True, slots=True)
class Weights:
    """How large the weights of a run are, and what else is known of them and of the optimizers; None: not known.

    Attributes:
        largest: largest magnitude now; inf or NaN if a weight is.
        name: the parameter that holds it.
        at_start: largest magnitude before the first step.
        learning_rate: the largest of the optimizers.
        growth: how many times the largest magnitudes of all parameters together have grown.
        reach: how far an update can move a weight at most.
        decay: learning rate times weight decay.
        zero_eps: an eps of an optimizer that is 0 in the format of its state, and that format.
        bad_state: the tensors of the optimizers' states that are not finite.
    """

    largest: float
    name: str
    at_start: float | None = None
    learning_rate: float | None = None
    growth: float | None = None
    reach: float | None = None
    decay: float = 0.0
    zero_eps: tuple[float, str] | None = None
    bad_state: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        sizes: Iterable[tuple[float, str]],
        at_start: float | None = None,
        learning_rate: float | None = None,
        **more: Any,
    ) -> "Weights | None":
        """Returns those of parameters, given by their largest magnitude and name; None without one."""
        # A NaN is not larger than anything, and must be found all the same.
        found = max(sizes, key=lambda one: math.inf if math.isnan(one[0]) else one[0], default=None)
        return None if found is None else cls(*found, at_start, learning_rate, **more)

    @property
    def diverged(self) -> bool:
        """Whether they are not finite, or far larger than at the first step."""
        at_start = 1.0 if self.at_start is None or math.isnan(self.at_start) else max(1.0, self.at_start)
        return not self.largest < HUGE * at_start

    def broken_after(self, applied: int) -> bool:
        """Returns whether they are the fault, after so many applied steps. Without one, only if they are not finite."""
        return self.diverged and (applied > 0 or not math.isfinite(self.largest))

    def moved_otherwise(self, applied: int) -> bool:
        """Returns whether so many updates cannot have moved the weights as far as they are from the start."""
        if self.reach is None or self.at_start is None:
            return False
        return not self.largest <= self.at_start + self.reach * applied

    def why(self, condition: Condition, applied: int, written: int | None = None) -> Finding:
        """Returns why the weights have grown, or are not finite, after so many applied steps.

        `written` is the first step before which something other than the optimizer has written to them.
        """
        if self.at_start is not None and not math.isfinite(self.at_start):
            known = f"The weights of {self.name} were inf or NaN before the first step."
            return Finding(condition, known, do="Look at their initialization, or at the checkpoint they come from.")
        before = "" if self.at_start is None else f", and was {self.at_start:.3g} before the first step"
        known = f"The largest weight, in {self.name}, is {self.largest:.3g} after {_counted(applied, 'update')}{before}."
        look = "Look for code that writes to parameters or loads them. Restart from a checkpoint with good weights."
        if written is not None:
            other = f"Something other than the optimizer has written to the weights, first before step {written}."
            return Finding(condition, f"{known} {other}", do=look)
        if self.zero_eps is not None and not math.isfinite(self.largest):
            eps, dtype = self.zero_eps
            divides = f"The optimizer's eps of {eps:g} is 0 in its {dtype} state: where gradients are zero it divides by 0."
            master = " Keep float32 weights: use `MasterWeights` or `prepare`." if dtype == "float16" else ""
            return Finding(condition, f"{known} {divides}", do=f"Use a larger eps.{master}")
        if self.decay > 2:
            turns = f"Learning rate times weight decay is {self.decay:g}: above 2, every update makes weights larger."
            return Finding(condition, f"{known} {turns}", do="Lower one of the two.")
        if self.moved_otherwise(applied):
            far = f"At a learning rate of {self.learning_rate:g} an update moves a weight by {self.reach:.2g} at most."
            return Finding(condition, f"{known} {far}", "something other than the optimizer has written to them", look)
        rate = "" if self.learning_rate is None else f" ({self.learning_rate:g})"
        lower = "Lower it or warm it up, and restart from a checkpoint with good weights."
        return Finding(condition, known, f"the learning rate{rate} is too high", lower)


class Losses(NamedTuple):
    """The losses of one step, and the scale that they were multiplied by."""

    values: Sequence[float]
    scale: float

    @property
    def mean(self) -> float:
        """Their mean."""
        return sum(self.values) / len(self.values)

    @property
    def twice(self) -> bool:
        """Whether one of them is exactly another one times the scale."""
        return self.scale != 1 and not {each * self.scale for each in self.values if each}.isdisjoint(self.values)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run, in host memory: the one table that health, doctor, `ScaleStuck` and probe share.

    Attributes:
        scale: the scale of the next loss.
        applied: steps applied so far.
        skipped: steps skipped so far.
        consecutive_skips: steps skipped since the last applied one.
        stuck: the last step overflowed, and the scale could not go lower.
        recent: steps applied and skipped since the last look, or since the start.
        bad_losses: those of the recent skips whose loss was not finite.
        rows: rows of recent skips that began with an overflow.
        status: of the last step; None before the first.
        last_finite_loss: the last step whose loss was finite, counted from 1; None if none is known.
        headroom_bits: how often the scale could double before the largest gradient overflows; inf if all gradients are
            zero, NaN if it is not known.
        culprits: the parameters whose gradients were not finite in the last skipped step.
        parameters: how many parameters had gradients in the last step; 0 where that is not known.
        without_gradients: parameters of the optimizers that had none.
        weights: how large the weights are; None where that is not known.
        first_losses: of the first step; None where they are not known.
        losses: of the last step whose losses were finite; None where they are not known.
        policy: name of the policy; empty where it is not known.
        rank: this rank, the number of ranks, and whether its own losses were finite; None for one rank.
        probed: what a probe of the last skipped step has found; empty without one.
        written: the first step before which something other than the optimizer has written to the weights.
        multiplied: the factor that the loss was multiplied by last, before the scaler; None where it is not known.
        lost: the parameters of whose gradients a share is zero, and is not in float32, with that share.
        zero_in_float32: whether all gradients are zero in float32 too; None where that is not known.
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
    bad_losses: int = 0
    rows: int = 0
    status: Status | None = None
    last_finite_loss: int | None = None
    headroom_bits: float = math.nan
    culprits: Sequence[Culprit] = ()
    parameters: int = 0
    without_gradients: Sequence[str] = ()
    weights: Weights | None = None
    first_losses: Losses | None = None
    losses: Losses | None = None
    policy: str = ""
    rank: tuple[int, int, bool] | None = None
    probed: str = ""
    written: int | None = None
    multiplied: float | None = None
    lost: Mapping[str, float] = field(default_factory=dict[str, float])
    zero_in_float32: bool | None = None
    in_bf16: bool = False
    scaling: bool = True
    multiplies: bool = True

    @property
    def recent_steps(self) -> int:
        """Steps since the last look."""
        return sum(self.recent)

    @property
    def overflows(self) -> int:
        """Recent steps that overflowed."""
        return self.recent[1] - self.bad_losses

    @property
    def rise(self) -> float:
        """By which share of itself the loss has risen since the first step; 0 where that is not known."""
        if self.first_losses is None or self.losses is None or not (start := abs(self.first_losses.mean)):
            return 0.0
        return (self.losses.mean - self.first_losses.mean) / start

    @property
    def diverging(self) -> bool:
        """Whether weights and loss have grown together, or the weights more than the updates can have moved them."""
        if (weights := self.weights) is None or not self.applied:
            return False
        grown = weights.growth is not None and weights.growth >= GROWN
        return (grown and self.rise >= RISEN) or self.written is not None or weights.moved_otherwise(self.applied)


def diagnosis(seen: Evidence) -> Finding:
    """Returns what the evidence shows. What is certain comes before what is likely, and a fault before a note."""
    if not seen.scaling:
        return Finding(Condition.OK, "The policy does not scale, and checks nothing.")
    if seen.status is None:
        return Finding(Condition.OK, "No step was taken yet.")
    return next(found for row in ROWS if (found := row(seen)) is not None)


def fault_of_weights(seen: Evidence) -> Finding | None:
    """Returns what is wrong with the weights or the state of the optimizer, from the evidence; None if nothing is."""
    return _broken(seen) or _diverging(seen)


def _broken(seen: Evidence) -> Finding | None:
    weights = seen.weights
    if weights is None:
        return None
    if weights.bad_state:
        known = f"The state of the optimizer is not finite: {_listed(weights.bad_state)}. No learning rate or scale helps."
        return Finding(Condition.BROKEN, known, do="Load a checkpoint in which it is finite, or start with a new state.")
    if weights.broken_after(seen.applied):
        return weights.why(Condition.BROKEN, seen.applied, seen.written)
    return None


def _scaled_twice(seen: Evidence) -> Finding | None:
    if seen.multiplies and seen.losses is not None and seen.losses.twice:
        known = f"A loss was scaled twice: one is exactly another one times the scale of {_scale(seen.losses.scale)}."
        return Finding(Condition.SCALED_TWICE, known, do="Give the scaler the plain loss.")
    if seen.multiplied is not None:
        known = f"The loss is multiplied by {_scale(seen.multiplied)} before it is given to the scaler."
        do = "Gradients are that much larger than those of the plain loss: give that to the scaler, which multiplies it."
        return Finding(Condition.SCALED_TWICE, known, do=do)
    return None


def _nonfinite_loss(seen: Evidence) -> Finding | None:
    last = seen.status is Status.NONFINITE_LOSS
    if not last and not (seen.bad_losses > 1 and seen.bad_losses > THRASHING_RATE * seen.recent_steps):
        return None
    known = [_bad_losses(seen)]
    if last and seen.rank is not None:
        number, ranks, finite = seen.rank
        elsewhere = "it is finite, and it is not on another" if finite else "it is not finite"
        known += [f"On this rank, {number} of {ranks}, {elsewhere}."]
    known += [seen.probed] if seen.probed else []
    weights, suspected = seen.weights, ""
    if weights is not None and seen.diverging:
        _, why, suspected, _ = weights.why(Condition.DIVERGING, seen.applied, seen.written)
        known += [_rise(seen), why]
    elif weights is not None and weights.largest > FP16.max:
        known += [f"A weight of {weights.name} is {weights.largest:.3g}, and FP16 ends at {FP16.max:g}."]
    do = "No scale, retry or policy can help: look at the forward pass and the input batch."
    return Finding(Condition.NONFINITE_LOSS, " ".join(filter(None, known)), suspected, do)


def _stuck(seen: Evidence) -> Finding | None:
    if seen.status is Status.NO_GRADS and not seen.applied:
        known = "No parameter of the optimizer has a gradient."
        do = (
            "Look whether it was built with the parameters of this model, after they were last replaced, and whether "
            "they require gradients."
        )
        return Finding(Condition.STUCK, known, do=do)
    if not (seen.stuck and seen.consecutive_skips > 1):
        return None
    known, suspected, do = _overflow(seen.culprits, seen.parameters)
    if seen.probed:
        return Finding(Condition.STUCK, f"{known} {seen.probed}")
    if seen.scale > 1:  # Static, or a floor: that this scale is too high is as likely as that no scale would do
        high = f"the scale, {_scale(seen.scale)} at the lowest, is too high"
        return Finding(Condition.STUCK, known, " or ".join(filter(None, (high, suspected))), f"Try a lower one. {do}")
    return Finding(Condition.STUCK, known, suspected, do)


def _overflow(culprits: Sequence[Culprit], parameters: int) -> tuple[str, str, str]:
    """Returns which gradients overflow, why they may do so at any scale, and what to do."""
    if not parameters:
        known = "Gradients overflow, and the step did not record which."
        return known, "", "Run one with a batch of this run in a custom loop, and look at its culprits."
    if not culprits:
        suspected = "those of `scaler.grad`, another rank's, or FP16 ones that only overflow once divided by a scale below 1"
        return "Gradients overflowed that the step did not read.", suspected, ""
    if len(culprits) == 1:
        known = f"The gradient of one parameter, {culprits[0].name!r}, overflows."
        return known, "", "Look at its hooks and at the backward pass of its module: keep that in float32 if it overflows."
    if len(culprits) == parameters:
        suspected = (
            "a division by zero, a sqrt or a norm at zero in the backward pass, or gradients left over because they "
            "were not cleared"
        )
        return "Every gradient is inf or NaN although the loss is finite.", suspected, ""
    known = f"{len(culprits)} of {parameters} gradients overflow."
    return known, "part of the model overflows at any scale", "Keep the modules of these parameters in float32."


def _diverging(seen: Evidence) -> Finding | None:
    if not seen.diverging or seen.weights is None:
        return None
    found = seen.weights.why(Condition.DIVERGING, seen.applied, seen.written)
    return found._replace(known=f"{_rise(seen)} {found.known}".strip())


def _rise(seen: Evidence) -> str:
    if seen.first_losses is None or seen.losses is None or seen.weights is None or seen.rise < RISEN:
        return ""
    grown = "" if seen.weights.growth is None else f", and the weights grew {seen.weights.growth:.3g} times"
    return f"The loss rose from {seen.first_losses.mean:.3g} to {seen.losses.mean:.3g}{grown}."


def _unneeded(seen: Evidence) -> Finding | None:
    if not (seen.in_bf16 and seen.multiplies):
        return None
    return Finding(Condition.UNNEEDED, "The backward pass runs in BF16, which needs no scale.", do="Use `NoScaling()`.")


def _losing(seen: Evidence) -> Finding | None:
    if not seen.lost:
        return None
    shares = [f"{share:.0%} of that of {name}" for name, share in seen.lost.items()]
    known = f"Gradients that are not zero in float32 are zero at a scale of {_scale(seen.scale)}: {_listed(shares)}."
    do = "Look at what multiplies gradients on their way. `gradscale calibrate` shows which scale each needs alone."
    return Finding(Condition.UNDERFLOWING, known, do=do)


def _skipping(seen: Evidence) -> Finding | None:
    rate = seen.overflows / seen.recent_steps if seen.recent_steps else 0.0
    early = seen.applied < CALIBRATION_STEPS or seen.consecutive_skips > 1
    if seen.multiplies and seen.overflows and early and seen.rows <= CALIBRATION_ROWS:
        do = "To lose no batch, use `backward(loss, retries=8)`."
        return Finding(Condition.CALIBRATING, "The scale is still being found.", do=do)
    if rate <= THRASHING_RATE or (seen.recent_steps < CALIBRATION_STEPS and seen.rows <= CALIBRATION_ROWS):
        return None
    known = f"{seen.overflows} of {_counted(seen.recent_steps, 'step')} overflowed"
    known += f": {_listed([each.name for each in seen.culprits])}." if seen.culprits else "."
    look = "Look at the batch of a skipped step."
    if seen.probed:
        return Finding(Condition.THRASHING, f"{known} {seen.probed}")
    if not seen.multiplies:
        return Finding(Condition.THRASHING, f"{known} No scale is the cause.", do=look)
    margin = "A larger `margin_bits`" if seen.policy == "Headroom" else "`Headroom()`, or a longer `growth_interval`,"
    return Finding(Condition.THRASHING, known, do=f"{look} {margin} helps if gradients vary that much.")


def _underflowing(seen: Evidence) -> Finding | None:
    if not seen.multiplies:
        return None
    scale = _scale(seen.scale)
    if math.isinf(seen.headroom_bits):
        known = f"All gradients are zero at a scale of {scale}."
        if seen.zero_in_float32 or (seen.zero_in_float32 is None and seen.scale >= EXACT_ZERO):
            known += " They are zero without a scale too, and none can help."
            do = "Look whether the loss depends on the weights, and for units that are off for every input, as a dead ReLU."
            return Finding(Condition.ZERO_GRADIENTS, known, do=do)
        do = "They underflow, or are zero in float32 too: compare with a step there, as `gradscale doctor` does."
        return Finding(Condition.UNDERFLOWING, known, do=do)
    if not seen.headroom_bits > UNDERFLOW_BITS:
        return None
    known = f"The largest gradient could be 2**{seen.headroom_bits:.0f} times larger: small ones are zero in FP16."
    use = "a higher `max_scale`" if seen.policy == "Headroom" else "`Headroom()`, a higher `init_scale` or `max_scale`"
    do = f"Raise the scale above {scale}: use {use}, or a larger weight of the loss."
    return Finding(Condition.UNDERFLOWING, known, do=do)


def _bad_losses(seen: Evidence) -> str:
    if not seen.bad_losses:
        return ""
    since = seen.status is Status.NONFINITE_LOSS and seen.last_finite_loss is not None
    ever = f", and in all since step {seen.last_finite_loss + 1}" if since else ""  # type: ignore[operator]
    return f"The loss was inf or NaN in {seen.bad_losses} of {_counted(seen.recent_steps, 'step')}{ever}."


def _fine(seen: Evidence) -> Finding:
    if seen.bad_losses:
        return Finding(Condition.OK, _bad_losses(seen), do="Look at the batch if that happens again.")
    if missing := seen.without_gradients:
        known = f"{_counted(len(missing), 'parameter')} had no gradient, as frozen or unused ones have none"
        return Finding(Condition.OK, f"{known}: {_listed(missing)}.")
    return Finding(Condition.OK, "Nothing to do.")


ROWS: Sequence[Callable[[Evidence], Finding | None]] = (
    _broken,
    _scaled_twice,
    _nonfinite_loss,
    _stuck,
    _diverging,
    _unneeded,
    _losing,
    _skipping,
    _underflowing,
    _fine,
)
"""What may follow from the evidence. The first that does is the finding."""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _scale(scale: float) -> str:
    return number_text(scale).removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Health:
    """How a run is doing. As text it is one line.

    Attributes:
        condition: in a word.
        advice: what is known, then what is suspected if anything is, then what to do.
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
        updates = f"{_counted(self.applied, 'update')} in {_counted(self.steps, 'step')}"
        return f"{self.condition}: {updates}. {self.advice}"


def health_of(seen: Evidence) -> Health:
    """Returns how a run is doing."""
    found = diagnosis(seen)
    advice = str(found)
    if found.condition in (Condition.NONFINITE_LOSS, Condition.THRASHING, Condition.STUCK) and not seen.probed:
        advice += " A probe of a skipped step names the operation." if seen.skipped else ""
    return Health(found.condition, advice, seen.applied, seen.applied + seen.skipped, _numbers(seen))


def _numbers(seen: Evidence) -> dict[str, float | str]:
    """Returns the numbers that are known."""
    found: dict[str, float | str | None] = {
        "scale": seen.scale,
        "applied": seen.applied,
        "skipped": seen.skipped,
        "consecutive_skips": seen.consecutive_skips,
        "recent_steps": seen.recent_steps,
        "recent_skipped": seen.recent[1],
        "recent_bad_losses": seen.bad_losses,
        "headroom_bits": seen.headroom_bits,
        "status": "" if seen.status is None else seen.status.value,
        "policy": seen.policy,
        "parameters": seen.parameters,
        "parameters_without_gradient": len(seen.without_gradients),
        "culprits": ", ".join(f"{one.name} ({one.kind})" for one in seen.culprits[:5]),
        "first_loss": None if seen.first_losses is None else seen.first_losses.mean,
        "last_finite_loss": None if seen.losses is None else seen.losses.mean,
    }
    if seen.weights is not None:
        found |= {
            "largest_weight": seen.weights.largest,
            "largest_weight_name": seen.weights.name,
            "largest_weight_at_start": seen.weights.at_start,
            "weights_growth": seen.weights.growth,
            "bad_optimizer_state": ", ".join(seen.weights.bad_state),
        }
    return {name: value for name, value in found.items() if value is not None and value == value and value != ""}


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
        cause: what is known of the cause, what is suspected if anything is, and what to do.
    """

    def __init__(self, progress: Progress, scale: float, culprits: Sequence[Culprit], cause: str) -> None:
        self.culprits = list(culprits)
        self.cause = cause
        named = ", ".join(f"{culprit.name} ({culprit.kind})" for culprit in culprits[:5])
        more = f" and {len(culprits) - 5} more" if len(culprits) > 5 else ""
        listed = f" Gradients that were not finite: {named}{more}." if culprits else ""
        super().__init__(f"{_finding(progress, scale)} {cause}{listed}")


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

    def check(
        self, progress: Progress, last: StepResult, more: Callable[[], Mapping[str, Any]] = dict[str, Any]
    ) -> None:
        """Raises, warns or calls if the run is stuck. Synchronizes with the device only if it is.

        Args:
            progress: where the run stood after a step.
            last: the result of the last step, which on a device is a few steps later.
            more: measures what else is known, by the names of `Evidence`; called only for a report.

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
            seen = Evidence(scale, *progress[:3], stuck=True, status=status, culprits=culprits, parameters=last.parameters)
            error = ScaleStuck(progress, scale, culprits, str(diagnosis(replace(seen, **more()))))
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
