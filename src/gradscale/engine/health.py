"""How a run is doing: one condition, the numbers behind it, and what to do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit
from gradscale.engine.diagnosis import Weights, likely_cause
from gradscale.engine.result import Status

CALIBRATION_STEPS = 20
"""Applied steps until the search for a first scale is over. Fewer say nothing about a rate either."""

THRASHING_RATE = 0.05
"""Share of skipped steps that is too high. A dynamic scale that finds its limit by crossing it skips 0.05%."""

UNDERFLOW_BITS = 16.0
"""Headroom at which the largest gradient, times the scale, is below 1: of FP16's 40 binades, 16 are not used, and
gradients that are 2**24 times smaller than the largest are zero."""


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
    condition = condition_of(seen)
    return Health(condition, _advice(condition, seen), seen.applied, seen.applied + seen.skipped, _evidence(seen))


def condition_of(seen: Vitals) -> Condition:
    """Returns the condition of a run."""
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
    if condition is Condition.STUCK and seen.status is Status.NO_GRADS:
        return (
            "No parameter of the optimizer has a gradient. Look whether it was built with the parameters of this "
            "model, after they were last replaced, and whether they require gradients."
        )
    if condition in (Condition.BROKEN, Condition.FORWARD_OVERFLOW, Condition.STUCK):
        status = Status.APPLIED if seen.status is None else seen.status
        return "Likely cause: " + likely_cause(
            status, seen.culprits, seen.parameters, seen.weights, seen.applied, seen.scale
        )
    if condition is Condition.UNDERFLOWING:
        return _underflow(seen)
    return {
        Condition.CALIBRATING: "The scale is still being found. To lose no batch, use `backward(loss, retries=8)`.",
        Condition.THRASHING: _skips(seen),
        Condition.UNNEEDED: "The backward pass runs in BF16, which needs no scale: use `NoScaling()`.",
        Condition.OK: _fine(seen),
    }[condition]


def _skips(seen: Vitals) -> str:
    rate = f"{seen.recent_rate:.0%} of the steps are skipped."
    if not seen.multiplies:
        return f"{rate} No scale is the cause: look at the culprits of a skipped step and at its batch, or probe it."
    return (
        f"{rate} Use `Headroom()`, or a larger margin or interval, and look at the culprits of a skipped step, or "
        "probe it: one module may overflow alone."
    )


def _fine(seen: Vitals) -> str:
    if seen.status is None:
        return "No step was taken yet."
    if not seen.scaling:
        return "The policy does not scale, and checks nothing."
    if seen.without_gradients:
        shown = ", ".join(seen.without_gradients[:3]) + (", ..." if len(seen.without_gradients) > 3 else "")
        return f"{len(seen.without_gradients)} parameters had no gradient, as frozen or unused ones have none: {shown}."
    return "Nothing to do."


def _underflow(seen: Vitals) -> str:
    scale = number_text(seen.scale).removesuffix(".0")
    if math.isinf(seen.headroom_bits):
        return (
            f"All gradients are zero at a scale of {scale}: they underflow, or the loss does not use the weights. "
            "Raise the scale, or compare with a step in float32."
        )
    return (
        f"The largest gradient could be 2**{seen.headroom_bits:.0f} times larger, so that small ones are zero in FP16. "
        f"Raise the scale above {scale}: use `Headroom()`, a higher `init_scale` or `max_scale`, or a larger weight of "
        "the loss."
    )


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
