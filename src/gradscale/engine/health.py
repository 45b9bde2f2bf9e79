"""How a run is doing: one table of evidence, the findings that follow from it, and the check for a stuck run."""

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
from gradscale.formats import FP16
from gradscale.policies.checks import check_count
from gradscale.policies.contract import ScaleState

logger = logging.getLogger(__name__)
# `health()` returns what it logs: where no logging is set up, Python would print it a second time.
logger.addHandler(logging.NullHandler())

HUGE = 30.0
"""Growth of the largest weight that is a divergence; weights below 1 at the first step count as 1. Weights start below
1 and end a healthy run below 10. One update at a learning rate far too high multiplies them by a hundred or more."""

GROWN, RISEN, SOON = 3.0, 0.25, 1000
"""Growth of the weights, and rise of the loss, that together are a divergence within so many updates. Neither is one
alone, and later healthy weights have grown as much."""

CALIBRATION_STEPS = 20
"""Applied steps until the search for a first scale is over. Fewer say nothing about a rate either."""

CALIBRATION_ROWS = 2
"""Separate rows of skipped steps in that search: `Dynamic` has one, and `Headroom` may have another after its jump."""

THRASHING_RATE = 0.05
"""Share of skipped steps that is too high. A dynamic scale that finds its limit by crossing it skips 0.05%."""

UNDERFLOW_BITS = 16.0
"""Headroom at which the largest gradient, scaled, is below 1: gradients 2**24 times smaller than that are zero."""

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
    """How a run is doing."""

    OK = "ok"  # steps are applied, and gradients fit the format
    CALIBRATING = "calibrating"  # the scale is still being found: skips are normal
    THRASHING = "thrashing"  # too many steps overflow, one by one
    STUCK = "stuck"  # every step overflows, and no lower scale is left; or no step has had a gradient
    UNDERFLOWING = "underflowing"  # gradients are so small that many of them are zero
    ZERO_GRADIENTS = "zero_gradients"  # all gradients are zero, without a scale too
    UNNEEDED = "unneeded"  # the backward pass runs in BF16, and needs no scale
    SCALED_TWICE = "scaled_twice"  # the loss is multiplied by a scale before the scaler multiplies it
    NONFINITE_LOSS = "nonfinite_loss"  # the loss is or was inf or NaN, and the weights look sound
    DIVERGING = "diverging"  # loss and weights grow, or weights do that something else writes to
    BROKEN = "broken"  # weights or optimizer state are inf or NaN, or weights have diverged


HEALTHY = (Condition.OK, Condition.CALIBRATING)
"""Where nothing needs to be done."""


class Finding(NamedTuple):
    """What follows from the evidence: what is known, the likely cause if the evidence shows one, and what to do."""

    condition: Condition
    known: str = ""
    suspected: str = ""  # without a capital and a full stop
    do: str = ""

    def __str__(self) -> str:
        suspected = f"Likely cause: {self.suspected}." if self.suspected else ""
        return " ".join(filter(None, (self.known, suspected, self.do)))


@dataclass(frozen=True, slots=True)
class Weights:
    """How large the weights of a run are, and what else is known of them and of the optimizers; None is not known."""

    largest: float  # magnitude now; inf or NaN if a weight is
    name: str  # of the parameter that holds it
    at_start: float | None = None  # the largest before the first step
    learning_rate: float | None = None  # the largest of the optimizers
    growth: float | None = None  # of the largest magnitudes of all parameters together
    reach: float | None = None  # how far an update can move a weight at most
    decay: float = (
        0.0  # the largest learning rate times weight decay of optimizers that multiply weights by 1 less that
    )
    zero_eps: tuple[float, str] | None = None  # an eps of an optimizer that is 0 in the format of its state, and that
    bad_state: Sequence[str] = ()  # the tensors of the optimizers' states that are not finite

    @classmethod
    def of(cls, sizes: Iterable[tuple[float, str]], *more: Any, **others: Any) -> "Weights | None":
        """Returns those of parameters, given by their largest magnitude and name, and the rest; None without one."""
        # A NaN is not larger than anything, and must be found all the same.
        found = max(sizes, key=lambda one: math.inf if math.isnan(one[0]) else one[0], default=None)
        return None if found is None else cls(*found, *more, **others)

    def broken_after(self, applied: int) -> bool:
        """Returns whether they are not finite, or far larger than at the first step after so many applied ones."""
        at_start = 1.0 if self.at_start is None or math.isnan(self.at_start) else max(1.0, self.at_start)
        return not self.largest < HUGE * at_start and (applied > 0 or not math.isfinite(self.largest))

    def moved_otherwise(self, applied: int) -> bool:
        """Returns whether so many updates cannot have moved the weights as far as they are from the start."""
        known = self.reach is not None and self.at_start is not None
        return known and not self.largest <= self.at_start + self.reach * applied  # type: ignore[operator]


class Losses(NamedTuple):
    """The losses of one step, and the scale that they were multiplied by."""

    values: Sequence[float]
    scale: float

    @property
    def mean(self) -> float:
        """Their mean."""
        return sum(self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run, in host memory: the one table that health, doctor, `ScaleStuck` and probes share."""

    scale: float  # of the next loss
    applied: int  # steps applied so far
    skipped: int  # steps skipped so far
    consecutive_skips: int = 0  # since the last applied step
    stuck: bool = False  # the last steps overflowed, and the scale could not go lower
    recent: tuple[int, int] = (0, 0)  # steps applied and skipped since the last look, or since the start
    bad_losses: int = 0  # those of the recent skips whose loss was not finite
    rows: int = 0  # rows of recent skips that began with an overflow
    status: Status | None = None  # of the last step; None before the first
    last_finite_loss: int | None = None  # the last step whose loss was finite, counted from 1
    headroom_bits: float = math.nan  # doublings until the largest gradient overflows; inf if all are zero
    culprits: Sequence[Culprit] = ()  # the parameters whose gradients were not finite in the last skipped step
    parameters: int = 0  # how many had gradients in the last step; 0 where that is not known
    without_gradients: Sequence[str] = ()  # parameters of the optimizers that had none
    weights: Weights | None = None
    first_losses: Losses | None = None  # of the first step whose losses were finite
    losses: Losses | None = None  # of the last step whose losses were finite
    policy: str = ""  # its name; empty where it is not known
    rank: tuple[int, int, bool] | None = None  # this one, how many there are, and whether its own losses were finite
    probed: str = ""  # what a probe of the last skipped step has found
    written: int | None = None  # the first step before which something other than the optimizer wrote to weights
    lost: Mapping[str, float] = field(default_factory=dict[str, float])  # shares that are zero, and not in float32
    zero_in_float32: bool | None = None  # whether all gradients are zero there too
    in_bf16: bool = False  # the backward pass runs in BF16
    scaling: bool = True  # the policy scales or checks
    multiplies: bool = True  # it multiplies losses, and does not only check gradients

    @property
    def recent_steps(self) -> int:
        """Steps since the last look."""
        return sum(self.recent)

    @property
    def rose(self) -> str:
        """By how much the loss has risen since the first step, and weights with it, in a sentence; empty if it has not.

        Empty where one of the two is not known, and for a rise that batches alone may have.
        """
        first, last, growth = self.first_losses, self.losses, self.weights and self.weights.growth
        if first is None or last is None or growth is None or not last.mean - first.mean > RISEN * abs(first.mean):
            return ""
        return f"The loss rose from {first.mean:.3g} to {last.mean:.3g}, and the weights grew {growth:.3g} times."

    @property
    def diverging(self) -> bool:
        """Whether the weights have grown, and with them the loss, or by what something else writes to them."""
        grown = self.weights is not None and (self.weights.growth or 0.0) >= GROWN
        return grown and (self.written is not None or (bool(self.rose) and self.applied <= SOON))


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
        known = f"The state of the optimizer is not finite: {_listed(weights.bad_state)}."
        return Finding(Condition.BROKEN, known, do="Load a good checkpoint, or start with a new state.")
    return _why(seen, weights, Condition.BROKEN) if weights.broken_after(seen.applied) else None


def _diverging(seen: Evidence) -> Finding | None:
    if not seen.diverging or seen.weights is None:
        return None
    found = _why(seen, seen.weights, Condition.DIVERGING)
    return found._replace(known=f"{seen.rose} {found.known}".lstrip())


def _why(seen: Evidence, weights: Weights, condition: Condition) -> Finding:
    """Returns why weights have grown, or are not finite."""
    if weights.at_start is not None and not math.isfinite(weights.at_start):
        known = f"The weights of {weights.name} were inf or NaN before the first step."
        return Finding(condition, known, do="Look at their initialization, or at the checkpoint they come from.")
    before = "" if weights.at_start is None else f", and was {weights.at_start:.3g} before the first step"
    updates = _counted(seen.applied, "update")
    known = f"The largest weight, in {weights.name}, is {weights.largest:.3g} after {updates}{before}."
    rate = "" if weights.learning_rate is None else f" ({weights.learning_rate:g})"
    look = "Look for code that writes to parameters or loads them. Restart from a checkpoint with good weights."
    if seen.written is not None:
        other = f"Something other than the optimizer has written to the weights, first before step {seen.written}."
        return Finding(condition, f"{known} {other}", do=look)
    if weights.zero_eps is not None and not math.isfinite(weights.largest):
        eps, dtype = weights.zero_eps
        zero = f"The optimizer's eps of {eps:g} is 0 in its {dtype} state: where gradients are zero it divides by 0."
        masters = " Keep float32 weights: use `MasterWeights` or `prepare`." if dtype == "float16" else ""
        return Finding(condition, f"{known} {zero}", do=f"Use a larger eps.{masters}")
    if weights.decay > 2:
        turned = (
            f"Learning rate times weight decay is {weights.decay:g}: it multiplies weights by {1 - weights.decay:g}."
        )
        return Finding(condition, f"{known} {turned}", do="Lower it. Restart from a checkpoint with good weights.")
    if weights.moved_otherwise(seen.applied):
        far = f"At this learning rate{rate} an update moves a weight by {weights.reach:.2g} at most."
        other = "something other than the optimizer has written to them, or the learning rate was higher before"
        return Finding(condition, f"{known} {far}", other, look)
    otherwise = "" if weights.reach is not None else ", or something other than the optimizer writes to the weights"
    lower = "Lower it or warm it up, and restart from a checkpoint with good weights."
    return Finding(condition, known, f"the learning rate{rate} is too high{otherwise}", lower)


def _scaled_twice(seen: Evidence) -> Finding | None:
    if seen.losses is None or seen.losses.scale == 1 or not seen.multiplies:
        return None
    values, scale = seen.losses
    if {each * scale for each in values if each}.isdisjoint(values):
        return None
    known = f"A loss was scaled twice: one is exactly another one times the scale of {_scale(scale)}."
    return Finding(Condition.SCALED_TWICE, known, do="Give the scaler the plain loss.")


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
    if fault := _diverging(seen):
        known, suspected = [*known, fault.known], fault.suspected
    elif weights is not None and weights.largest > FP16.max:
        known += [f"A weight of {weights.name} is {weights.largest:.3g}, and FP16 ends at {FP16.max:g}."]
    do = "No scale, retry or policy can help: look at the forward pass and the input batch."
    return Finding(Condition.NONFINITE_LOSS, " ".join(filter(None, known)), suspected, do)


def _stuck(seen: Evidence) -> Finding | None:
    if seen.status is Status.NO_GRADS and not seen.applied:
        known = "No parameter of the optimizer has a gradient."
        return Finding(
            Condition.STUCK, known, do="Look whether it has this model's, and whether they require gradients."
        )
    if not seen.stuck:
        return None
    culprits, number, suspected = seen.culprits, len(seen.culprits), ""
    if not seen.parameters:
        known = "Gradients overflow, and the step did not record which."
        do = "Run one with a batch of this run in a custom loop, and look at its culprits."
    elif not culprits:
        known, do = "Gradients overflowed that the step did not read.", ""
        suspected = "`scaler.grad`, another rank, or FP16 gradients that overflow when a scale below 1 divides them"
    elif number == 1:
        known = f"The gradient of one parameter, {culprits[0].name!r}, overflows."
        do = "Look at its hooks and at the backward pass of its module: keep that in float32 if it overflows."
    elif number == seen.parameters:
        known, do = "Every gradient is inf or NaN although the loss is finite.", ""
        suspected = "a division, a sqrt or a norm at zero in the backward pass, or gradients that were not cleared"
    else:
        known = f"{number} of {seen.parameters} gradients overflow."
        suspected, do = "part of the model overflows at any scale", "Keep the modules of these parameters in float32."
    if seen.probed:
        return Finding(Condition.STUCK, f"{known} {seen.probed}")
    if seen.scale > 1:  # Static, or a floor: that this scale is too high is as likely as that no scale would do
        high = f"the scale, {_scale(seen.scale)} at the lowest, is too high"
        suspected, do = " or ".join(filter(None, (high, suspected))), f"Try a lower one. {do}".rstrip()
    return Finding(Condition.STUCK, known, suspected, do)


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
    overflows = seen.recent[1] - seen.bad_losses
    rate = overflows / max(1, seen.recent_steps)
    early = seen.applied < CALIBRATION_STEPS or seen.consecutive_skips > 1
    if seen.multiplies and overflows and early and seen.rows <= CALIBRATION_ROWS:
        do = "To lose no batch, use `backward(loss, retries=8)`."
        return Finding(Condition.CALIBRATING, "The scale is still being found.", do=do)
    if rate <= THRASHING_RATE or (seen.recent_steps < CALIBRATION_STEPS and seen.rows <= CALIBRATION_ROWS):
        return None
    known = f"{overflows} of {_counted(seen.recent_steps, 'step')} overflowed"
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
            do = "Look whether the loss depends on the weights, and for units that are always off, as a dead ReLU."
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
    if seen.written is not None:
        return Finding(
            Condition.OK, f"Something other than the optimizer writes to weights, first before step {seen.written}."
        )
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
    of_it = "scale", "applied", "skipped", "consecutive_skips", "recent_steps", "bad_losses", "headroom_bits", "policy"
    found = {name: getattr(seen, name) for name in (*of_it, "parameters")} | {
        "recent_skipped": seen.recent[1],
        "status": "" if seen.status is None else seen.status.value,
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


class ScaleStuck(RuntimeError):
    """Raised when step after step is skipped and no lower scale is left to try.

    Attributes:
        culprits: the parameters whose gradients were not finite in the last step.
        cause: what is known of the cause, what is suspected if anything is, and what to do.
    """

    def __init__(self, seen: Evidence) -> None:
        self.culprits = list(seen.culprits)
        self.cause = str(diagnosis(seen))
        named = [f"{culprit.name} ({culprit.kind})" for culprit in self.culprits]
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        listed = f" Gradients that were not finite: {', '.join(named[:5])}{more}." if named else ""
        super().__init__(f"{_stuck_since(seen)} {self.cause}{listed}")


def _stuck_since(seen: Evidence) -> str:
    """Returns what was found, as a sentence, with the numbers of steps, counted from 1."""
    found, finite = f"{seen.consecutive_skips} steps in a row were skipped", seen.status is not Status.NONFINITE_LOSS
    if not finite and seen.last_finite_loss is not None:
        return f"{found}, and the loss is inf or NaN since step {seen.last_finite_loss + 1}."
    first = seen.applied + seen.skipped - seen.consecutive_skips + 1
    found += ", every step so far" if first == 1 else f", since step {first}"
    if not finite:
        return f"{found}, and the loss is inf or NaN."
    lowest = _scale(seen.scale)
    if seen.scale > 1:
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
        self,
        state: ScaleState,
        last: StepResult,
        loss_finite: bool,
        more: Callable[[], Mapping[str, Any]] = dict[str, Any],
    ) -> None:
        """Raises `ScaleStuck`, warns or calls if the run is stuck. Synchronizes with the device only if it is.

        `last` is the result of the last step, on a device a few steps later than the state and the loss. `more` returns
        what else is known, by the names of `Evidence`.
        """
        # Skips alone are not enough: from a high initial scale a run may skip many steps and still find its scale.
        counts = int(state.applied), int(state.skipped), int(state.consecutive_skips)
        if counts[-1] < self.max_consecutive_skips:
            self.reported = False
            return
        reported = self.on_stuck == "ignore" or (self.reported and self.on_stuck != "raise")
        if not last.attempted or reported or (loss_finite and not state.stuck):
            return
        found: dict[str, Any] = {"status": Status.of(False, loss_finite), "culprits": last.culprits()}
        found["parameters"] = last.parameters
        error = ScaleStuck(Evidence(float(last.next_scale), *counts, stuck=True, **{**found, **more()}))
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
