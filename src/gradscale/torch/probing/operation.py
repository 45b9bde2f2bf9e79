"""One operation of a step, as the probe has seen it."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradscale.torch.local import local


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


def is_number_tensor(value: object) -> bool:
    """Returns whether `value` is a tensor whose numbers may be inf or NaN."""
    if not isinstance(value, Tensor) or value.layout not in (torch.strided, torch.sparse_coo):
        return False
    return value.is_floating_point() or value.is_complex()
