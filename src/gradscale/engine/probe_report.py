"""What a probe has found: the operations of a step, where numbers that are not finite come from, and what follows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit
from gradscale.engine.health import Evidence, fault_of_weights
from gradscale.formats import FP16

SHOWN = 8
"""How many of the operations before are part of the text. All are in `frames`."""

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

    @property
    def finite(self) -> bool:
        """Whether all its numbers are finite."""
        return math.isfinite(self.amax)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} amax {self.amax:.3g}"


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program, counted from 1. The text is empty where it is not known."""

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
    """Where numbers that are not finite come from."""

    operation: Operation | None = None  # the first that returned them, or was given them; None if not known
    outside: str | None = None  # the tensor that held them before the step, by name or as "an input"
    parameter: bool = False  # whether that is a parameter or buffer of the model
    intended: bool = False  # whether they are an infinity that was put there, as the -inf of an attention mask
    overflow: bool | None = None  # whether the operation is finite in float64; None if not known


class Run(NamedTuple):
    """One run of a step, whose operations were looked at or not."""

    loss: float  # unscaled
    culprits: tuple[Culprit, ...]
    origin: Origin = Origin()
    operations: Sequence[Operation] = ()  # that of the origin and those before it; without one all

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
            reaches = "the loss" if one.phase == "forward" else "a gradient"
            lines.append(
                f"First operation whose inf or NaN reaches {reaches}: {one.name} in the {one.phase} pass, {one.place}"
            )
            lines += [f"  {one.source}"] if one.source else []
            lines += [f"  given {', '.join(map(str, one.inputs))}"] if one.inputs else []
            lines.append(f"  returned {', '.join(map(str, one.outputs))}")
            before = [f"  {each}" for each in self.frames[-SHOWN - 1 : -1]]
            lines += ["Operations before it:", *before] if before else []
        return "\n".join(lines)


UNDEFINED = {
    "div": "a division by zero",
    "reciprocal": "a division by zero",
    "log": "a logarithm of zero or of a negative number",
    "sqrt": "a square root of a negative number",
    "rsqrt": "a square root of zero or of a negative number",
    "exp": "an exponential of a number that is too large",
    "_softmax": "a softmax over a row that is masked as a whole",
    "_log_softmax": "a softmax over a row that is masked as a whole",
    "nll_loss_forward": "a mean over no label, where all are masked",
}
"""What is infinite or undefined in an operator of the forward pass."""

ANY_UNDEFINED = (
    "infinite or undefined, as a division, a logarithm, a square root or a norm at zero, or a softmax over a row that "
    "is masked as a whole"
)


def judged(
    run: Run,
    origin: Origin,
    scale: float,
    halvings: int | None,
    seen: Evidence | None,
    large: str | None,
    other_finite: bool | None,
    bad_ranks: str = "",
) -> tuple[Verdict, str]:
    """Returns what is wrong with a step, and what to do, from its run at the scale of training and the cause.

    None stands for what is not known: how often the scale must be halved, if no lower one helps or none is needed; the
    evidence of the run; and whether another batch is finite. `large` is a weight above the range of FP16, and
    `bad_ranks` are those whose numbers are not finite.
    """
    at, operation = number_text(scale).removesuffix(".0"), origin.operation
    name = "an operation" if operation is None else f"`{operation.name}` {operation.place}"
    fault = None if seen is None else fault_of_weights(seen)
    if run.finite:
        elsewhere = f" on this rank, not on {bad_ranks}" if bad_ranks else ""
        return Verdict.FINITE, f"loss and gradients are finite at a scale of {at}{elsewhere}."
    if halvings is not None:
        fitting, times = scale / 2**halvings, "once" if halvings == 1 else f"{halvings} times"
        low = number_text(fitting).removesuffix(".0")
        other = " Another batch is finite at this scale." if other_finite else ""
        below_1 = " That is below 1: use a policy that goes there, as `Headroom()` does, or divide the loss."
        dynamic = " A dynamic policy gets there by itself; with `scaler.backward(loss, retries=...)` no batch is lost."
        return Verdict.SCALE_TOO_HIGH, (
            f"the scale of {at} is too high for this step. Halved {times}, to {low}, it gives finite gradients.{other}"
            f"{below_1 if fitting < 1 else dynamic}"
        )
    if origin.parameter:
        known = f"{origin.outside} is inf or NaN before the step, and no loss scale can help."
        checkpoint = "Load a checkpoint with good weights, or look at their initialization."
        return Verdict.BROKEN_WEIGHTS, f"{known} {checkpoint if fault is None else fault}"
    if origin.outside is not None:
        return Verdict.BROKEN_DATA, f"{origin.outside} is inf or NaN before the model sees it. {_DATA}"
    if fault is not None:
        return Verdict.BROKEN_WEIGHTS, str(fault)
    forward = operation is not None and operation.phase == "forward"
    dtype = operation.outputs[0].dtype if operation is not None else ""
    if large is not None and origin.overflow and forward and dtype == "float16":
        known = f"a weight of {large}, and FP16 ends at {FP16.max:g}: {name} overflows."
        return Verdict.BROKEN_WEIGHTS, f"{known} Look at how that weight has become so large."
    if other_finite:
        return Verdict.BAD_BATCH, f"{name} is not finite for this batch, and another batch is finite. {_DATA}"
    if operation is not None and origin.overflow and forward and dtype not in ("float32", "float64"):
        where = f"`{operation.module}`" if operation.module else "this part"
        return Verdict.FORWARD_OVERFLOW, (
            f"the forward pass overflows {dtype} in {name}, and no loss scale can help. "
            f"Keep {where} in float32 (`torch.autocast(..., enabled=False)`), or make its numbers smaller."
        )
    what, do = ANY_UNDEFINED, "add an epsilon, or leave such rows out"
    if operation is not None and forward and not origin.overflow:
        what = UNDEFINED.get(operation.name, what)
    if operation is not None and operation.name == "exp":
        do = "subtract the largest argument first, as `logsumexp` does, or make it smaller"
    return Verdict.UNDEFINED, f"{name} is {what}. No scale can help: {do}."
