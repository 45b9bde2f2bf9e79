"""What a probe has found: the operations of a step, where numbers that are not finite come from, and what follows."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit
from gradscale.engine.diagnosis import Weights
from gradscale.torch.local import local

SHOWN = 8
"""How many of the operations before are part of the text. All are in `frames`."""

_WIDE = ("float32", "float64")
_DATA = "Look at the batch, and skip or repair such examples when they are loaded."


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the probe keeps of a tensor.

    Attributes:
        shape: its shape; of a DTensor, that of the part held here.
        dtype: its dtype, without `torch.`.
        amax: its largest magnitude; inf or NaN if it holds one, and NaN if it holds both.
    """

    shape: tuple[int, ...]
    dtype: str
    amax: float

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorFacts":
        """Returns those of a tensor of floating-point or complex numbers. Synchronizes with the device."""
        held = local(tensor.detach())
        dtype = str(held.dtype).removeprefix("torch.")
        if not held.numel() or held.device.type == "meta":
            return cls(tuple(held.shape), dtype, 0.0)
        values = held.coalesce().values() if held.is_sparse else held
        wide = values.float() if values.dtype.itemsize < 2 else values  # FP8 has no kernel for a maximum
        return cls(tuple(held.shape), dtype, float(wide.abs().amax()))

    @property
    def finite(self) -> bool:
        """Whether all its numbers are finite."""
        return math.isfinite(self.amax)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} amax {self.amax:.3g}"


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program.

    Attributes:
        file: its file.
        line: its number, counted from 1.
        function: the function it is in.
        text: the line itself; empty where it is not known.
    """

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that a step has run.

    Attributes:
        index: its position in the step, counted from 0.
        name: of torch's operator, such as `addmm`.
        phase: whether it is of the forward or the backward pass.
        module: path of the module that called it, or in the backward pass the operation it belongs to; `""` is the
            model itself; None is outside of the model, as a loss function is.
        module_type: the class of that module; empty outside of the model.
        source: the user's line that called it, or in the backward pass the operation it belongs to; None if unknown.
        inputs: facts of the tensors it was given.
        outputs: facts of the tensors it returned.
    """

    index: int
    name: str
    phase: Literal["forward", "backward"]
    module: str | None
    module_type: str
    source: Source | None
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]

    @property
    def finite(self) -> bool:
        """Whether all its results are finite."""
        return all(each.finite for each in self.outputs)

    @property
    def inputs_finite(self) -> bool:
        """Whether everything that it was given is finite."""
        return all(each.finite for each in self.inputs)

    @property
    def place(self) -> str:
        """The module, as words."""
        if self.module is None:
            return "outside of the model"
        return f"in {self.module} ({self.module_type})" if self.module else f"in the model itself ({self.module_type})"

    def __str__(self) -> str:
        given = ", ".join(map(str, self.inputs))
        return f"{self.phase:8} {self.name} {self.place}: {given} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where numbers that are not finite come from.

    Attributes:
        operation: the first that returned them, or that was given them if they come from outside.
        outside: the tensor of the model that held them before the step, or `"an input"`; None if the operation made
            them.
        parameter: whether that tensor is a parameter or buffer of the model.
        intended: whether they are an infinity that was put there, such as the -inf of an attention mask.
        overflow: whether the operation gives finite numbers from the same inputs in float64; None if not known.
        frames: the operation and those before it.
    """

    operation: Operation
    outside: str | None = None
    parameter: bool = False
    intended: bool = False
    overflow: bool | None = None
    frames: tuple[Operation, ...] = ()


def is_number_tensor(value: object) -> bool:
    """Returns whether `value` is a tensor whose numbers may be inf or NaN."""
    if not isinstance(value, Tensor) or value.layout not in (torch.strided, torch.sparse_coo):
        return False
    return value.is_floating_point() or value.is_complex()


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a step.

    Attributes:
        loss: the loss, unscaled.
        culprits: the parameters whose gradients are not finite.
        origin: where the first number that is not finite comes from, if the run was looked at and it is known.
        frames: its last operations, if it was looked at.
    """

    loss: float
    culprits: tuple[Culprit, ...]
    origin: Origin | None
    frames: tuple[Operation, ...]

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite."""
        return math.isfinite(self.loss) and not self.culprits


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


def report_of(
    run: Run, scale: float, halvings: int | None, weights: Weights | None, other_finite: bool | None
) -> ProbeReport:
    """Returns what follows from the runs of a probe.

    Args:
        run: the one at the scale of training.
        scale: the scale of the loss.
        halvings: how often the scale must be halved for finite gradients; None if no scale helps or none is needed.
        weights: how large the weights are; None where that was not measured.
        other_finite: whether another batch is finite at the same scale; None if none was given.
    """
    origin = None if run.finite else run.origin
    at, fitting = number_text(scale).removesuffix(".0"), None if halvings is None else scale / 2**halvings
    name = "an operation" if origin is None else f"`{origin.operation.name}` {origin.operation.place}"
    dtype = None if origin is None or not origin.operation.outputs else origin.operation.outputs[0].dtype
    if run.finite:
        verdict, advice = Verdict.FINITE, f"loss and gradients are finite at a scale of {at}."
    elif fitting is not None:
        verdict = Verdict.SCALE_TOO_HIGH
        times, low = "once" if halvings == 1 else f"{halvings} times", number_text(fitting).removesuffix(".0")
        advice = f"the scale of {at} is too high for this step. Halved {times}, to {low}, it gives finite gradients."
        advice += " Another batch is finite at this scale." if other_finite else ""
        if fitting < 1:
            advice += " That is below 1: use a policy that goes there, as `Headroom()` does, or divide the loss."
        else:
            advice += (
                " A dynamic policy gets there by itself; with `scaler.backward(loss, retries=...)` no batch is lost."
            )
    elif origin is not None and origin.outside is not None and origin.parameter:
        verdict = Verdict.BROKEN_WEIGHTS
        advice = (
            f"{origin.outside} is inf or NaN before the step, and no loss scale can help. Load a checkpoint with good "
            "weights, or look at their initialization."
        )
    elif origin is not None and origin.outside is not None:
        verdict, advice = Verdict.BROKEN_DATA, f"{origin.outside} is inf or NaN before the model sees it. {_DATA}"
    elif weights is not None and weights.diverged:
        verdict, advice = Verdict.BROKEN_WEIGHTS, weights.as_cause()
    elif other_finite:
        verdict = Verdict.BAD_BATCH
        advice = f"{name} is not finite for this batch, and another batch is finite. {_DATA}"
    elif origin is not None and origin.overflow and origin.operation.phase == "forward" and dtype not in _WIDE:
        verdict = Verdict.FORWARD_OVERFLOW
        where = f"`{origin.operation.module}`" if origin.operation.module else "this part"
        advice = (
            f"the forward pass overflows {dtype} in {name}, and no loss scale can help. "
            f"Keep {where} in float32 (`torch.autocast(..., enabled=False)`), or make its numbers smaller."
        )
    else:
        verdict = Verdict.UNDEFINED
        advice = (
            f"{name} is infinite or undefined whatever the scale, as a division, a logarithm, a square root or a norm "
            "at zero, or a softmax over a row that is masked as a whole. Add an epsilon, or leave such rows out."
        )
    found = (None, None, None) if origin is None else (origin.operation, origin.overflow, origin.outside)
    kept = run.frames if origin is None else origin.frames
    return ProbeReport(verdict, advice, *found, scale, fitting, halvings, run.loss, run.culprits, kept)
