"""What a probe has found, and what follows from it."""

import math
from dataclasses import dataclass
from enum import StrEnum

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit
from gradscale.engine.diagnosis import Weights
from gradscale.torch.probing.operation import Operation
from gradscale.torch.probing.origins import Origin

SHOWN = 8
"""How many of the operations before are part of the text. All are in `frames`."""


class Verdict(StrEnum):
    """What is wrong with a step.

    Attributes:
        FINITE: nothing: loss and gradients are finite at this scale.
        SCALE_TOO_HIGH: the gradients are finite at a lower scale.
        FORWARD_OVERFLOW: the forward pass exceeds the range of FP16, or of what it runs in. No loss scale can help.
        UNDEFINED: an operation is infinite or undefined in float32 too, as a division or a square root at zero is.
        BROKEN_WEIGHTS: a weight or buffer was inf or NaN before the step, or the weights have diverged.
        BROKEN_DATA: an input of the step is inf or NaN.
        BAD_BATCH: another batch is finite in the same model.
    """

    FINITE = "finite"
    SCALE_TOO_HIGH = "scale_too_high"
    FORWARD_OVERFLOW = "forward_overflow"
    UNDEFINED = "undefined"
    BROKEN_WEIGHTS = "broken_weights"
    BROKEN_DATA = "broken_data"
    BAD_BATCH = "bad_batch"


@dataclass(frozen=True, slots=True)
class Findings:
    """What the runs of a probe have shown.

    Attributes:
        scale: the scale of the loss.
        loss: the loss, unscaled.
        origin: where the first number that is not finite comes from; None if all are finite or it is not known.
        culprits: the parameters whose gradients are not finite.
        halvings: how often the scale must be halved for finite gradients; None if no scale helps or none is needed.
        weights: how large the weights are; None where that was not measured.
        other_finite: whether another batch is finite at the same scale; None if none was given.
        frames: the last operations of the step.
    """

    scale: float
    loss: float
    origin: Origin | None = None
    culprits: tuple[Culprit, ...] = ()
    halvings: int | None = None
    weights: Weights | None = None
    other_finite: bool | None = None
    frames: tuple[Operation, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The report of a probe. As text it is a few lines that name the operation and say what to do.

    Attributes:
        verdict: what is wrong.
        advice: what to do, in a sentence or two.
        operation: the first operation whose result is not finite, or that was given a weight or an input that is not;
            None if all are finite.
        overflow: whether that operation is finite in float64; None if that is not known.
        tensor: the parameter, buffer or input that was not finite before the step; None without one.
        scale: the scale that the loss was multiplied by.
        fitting_scale: the largest power-of-two fraction of it at which the gradients are finite; None if there is none.
        halvings: how often the scale must be halved to get there; None if there is none.
        loss: the loss, unscaled.
        culprits: the parameters whose gradients are not finite.
        frames: the last operations, the one above at the end.
    """

    verdict: Verdict
    advice: str
    operation: Operation | None
    overflow: bool | None
    tensor: str | None
    scale: float
    fitting_scale: float | None
    halvings: int | None
    loss: float
    culprits: tuple[Culprit, ...]
    frames: tuple[Operation, ...]

    @classmethod
    def of(cls, found: Findings) -> "ProbeReport":
        """Returns what follows from the findings."""
        verdict = _verdict(found)
        origin = None if verdict is Verdict.FINITE else found.origin
        return cls(
            verdict,
            _advice(verdict, found),
            None if origin is None else origin.operation,
            None if origin is None else origin.overflow,
            None if origin is None else origin.outside,
            found.scale,
            None if found.halvings is None else found.scale / 2**found.halvings,
            found.halvings,
            found.loss,
            found.culprits,
            found.frames if origin is None else origin.frames,
        )

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.advice}"]
        if self.operation is not None:
            one = self.operation
            lines.append(f"First operation that is not finite: {one.name} in the {one.phase} pass, {one.place}")
            lines += [f"  {one.source}"] if one.source else []
            lines += [f"  given {', '.join(map(str, one.inputs))}"] if one.inputs else []
            lines.append(f"  returned {', '.join(map(str, one.outputs))}")
        if len(self.frames) > 1 and self.operation is not None:
            lines.append("Operations before it:")
            lines += [f"  {each}" for each in self.frames[-SHOWN - 1 : -1]]
        return "\n".join(lines)


def _verdict(found: Findings) -> Verdict:
    """Returns what is wrong."""
    if math.isfinite(found.loss) and not found.culprits:
        return Verdict.FINITE
    if found.halvings is not None:
        return Verdict.SCALE_TOO_HIGH
    origin = found.origin
    if origin is not None and origin.outside is not None and origin.parameter:
        return Verdict.BROKEN_WEIGHTS
    if origin is not None and origin.outside is not None:
        return Verdict.BROKEN_DATA
    if found.weights is not None and found.weights.diverged:
        return Verdict.BROKEN_WEIGHTS
    if found.other_finite:
        return Verdict.BAD_BATCH
    if origin is not None and origin.overflow and _is_narrow_forward(origin.operation):
        return Verdict.FORWARD_OVERFLOW
    return Verdict.UNDEFINED


def _is_narrow_forward(operation: Operation) -> bool:
    """Returns whether an operation is of the forward pass, in a format that is narrower than float32."""
    return operation.phase == "forward" and operation.outputs[0].dtype not in ("float32", "float64")


def _advice(verdict: Verdict, found: Findings) -> str:
    """Returns what to do about it."""
    origin = found.origin
    name = "an operation" if origin is None else f"`{origin.operation.name}`"
    place = "" if origin is None else f" {origin.operation.place}"
    scale = number_text(found.scale).removesuffix(".0")
    if verdict is Verdict.FINITE:
        return f"loss and gradients are finite at a scale of {scale}."
    if verdict is Verdict.SCALE_TOO_HIGH:
        return _lower_the_scale(found, scale)
    if verdict is Verdict.BROKEN_WEIGHTS:
        return _repair_the_weights(found)
    if verdict is Verdict.BROKEN_DATA:
        return f"{'an input' if origin is None else origin.outside} is inf or NaN before the model sees it. {_DATA}"
    if verdict is Verdict.BAD_BATCH:
        return f"{name}{place} is not finite for this batch, and another batch is finite. {_DATA}"
    if verdict is Verdict.FORWARD_OVERFLOW and origin is not None:
        return (
            f"the forward pass overflows {origin.operation.outputs[0].dtype} in {name}{place}, and no loss scale can "
            f"help. {_keep_wide(origin.operation)}"
        )
    return (
        f"{name}{place} is infinite or undefined whatever the scale, as a division, a logarithm, a square root or a "
        "norm at zero, or a softmax over a row that is masked as a whole. Add an epsilon, or leave such rows out."
    )


_DATA = "Look at the batch, and skip or repair such examples when they are loaded."


def _lower_the_scale(found: Findings, scale: str) -> str:
    halvings = found.halvings or 0
    fitting = number_text(found.scale / 2**halvings).removesuffix(".0")
    other = " Another batch is finite at this scale." if found.other_finite else ""
    times = "once" if halvings == 1 else f"{halvings} times"
    below = (
        " That is below 1: use a policy that goes there, as `Headroom()` does, or divide the loss."
        if found.scale / 2**halvings < 1
        else " A dynamic policy gets there by itself; with `scaler.backward(loss, retries=...)` no batch is lost."
    )
    return (
        f"the scale of {scale} is too high for this step. Halved {times}, to {fitting}, it gives finite gradients."
        f"{other}{below}"
    )


def _repair_the_weights(found: Findings) -> str:
    if found.origin is not None and found.origin.outside is not None:
        return (
            f"{found.origin.outside} is inf or NaN before the step, and no loss scale can help. Load a checkpoint with "
            "good weights, or look at their initialization."
        )
    return "the weights have diverged." if found.weights is None else found.weights.as_cause()


def _keep_wide(operation: Operation) -> str:
    where = f"`{operation.module}`" if operation.module else "this part"
    return f"Keep {where} in float32 (`torch.autocast(..., enabled=False)`), or make its numbers smaller."
