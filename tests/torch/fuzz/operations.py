"""What a program does: small frozen values, each a call that a training loop makes."""

from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from tests.torch.fuzz.setup import Parameter, Setup
from torch import Tensor


@dataclass(frozen=True)
class Fault:
    """One element that the backward pass sets in the scaled gradient of a parameter: inf, NaN, or a huge number."""

    parameter: str
    index: int
    value: float


@dataclass(frozen=True)
class Batch:
    """A micro-batch: it gives the coefficients of the loss, which are the gradients.

    Attributes:
        seed: of the coefficients.
        parameters: those that the loss uses.
        loss_factor: what the loss is multiplied by: a power of two, or inf or NaN.
        loss_offset: what is added to the loss. Inf or NaN leaves the gradients finite.
        faults: what goes wrong in the backward pass.
        seen: what the forward pass adds to the running statistics. NaN stands for a forward pass that overflows.
    """

    seed: int
    parameters: tuple[str, ...]
    loss_factor: float = 1.0
    loss_offset: float = 0.0
    faults: tuple[Fault, ...] = ()
    seen: float = 1.0

    def coefficients(self, parameter: Parameter) -> Tensor:
        """Returns the unscaled gradient of a parameter, in float64 or complex128."""
        return _coefficients(self.seed, parameter)

    def rows(self, parameter: Parameter) -> list[int]:
        """Returns the rows of a sparse parameter that the batch looks up; some of them twice."""
        rows = max(1, parameter.size)
        return [] if not parameter.size else [self.seed % rows, (self.seed // 3) % rows, self.seed % rows]


@lru_cache(maxsize=4096)
def _coefficients(seed: int, parameter: Parameter) -> Tensor:
    # The position in the alphabet tells parameters apart: `hash` differs from one process to the next.
    generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, parameter.name)))
    shape = (2, *parameter.shape)
    real, imaginary = torch.randint(-4, 5, shape, generator=generator).double() * 2.0**parameter.exponent
    return torch.complex(real, imaginary) if parameter.is_complex else real


@dataclass(frozen=True)
class Operation:
    """One call of a training loop."""


@dataclass(frozen=True)
class Backward(Operation):
    """A forward pass, and the backward pass of its scaled loss.

    Attributes:
        batch: the micro-batch.
        retries: the argument of `backward`.
        by_hand: whether it is `scaler.scale(loss).backward()`.
    """

    batch: Batch
    retries: int = 0
    by_hand: bool = False


@dataclass(frozen=True)
class Step(Operation):
    """A step of some optimizers, by their positions in the setup."""

    optimizers: tuple[int, ...] = (0,)
    clip_norm: float | None = None
    clip_value: float | None = None
    norm: bool = False


@dataclass(frozen=True)
class ZeroGrad(Operation):
    """Clears the gradients of an optimizer, or of the model where that is None."""

    optimizer: int | None = None
    set_to_none: bool = True


@dataclass(frozen=True)
class Unscaled(Operation):
    """A block in which the gradients of some optimizers are unscaled, and what is done inside."""

    optimizers: tuple[int, ...]
    inside: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Multiply(Operation):
    """Multiplies the gradient of a parameter in place."""

    parameter: str
    factor: float


@dataclass(frozen=True)
class Clamp(Operation):
    """Clamps the elements of a gradient in place, NaN to 0: it may hide an overflow."""

    parameter: str
    bound: float


@dataclass(frozen=True)
class Poke(Operation):
    """Sets an element of `.grad` in place to a value that is not finite."""

    parameter: str
    index: int
    value: float


@dataclass(frozen=True)
class ShareGradient(Operation):
    """Makes `.grad` of one parameter the very tensor that is `.grad` of another."""

    source: str
    target: str


@dataclass(frozen=True)
class AddGroup(Operation):
    """Adds parameters to an optimizer."""

    optimizer: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Freeze(Operation):
    """Makes a parameter require gradients, or no longer."""

    parameter: str
    trained: bool = False


@dataclass(frozen=True)
class SetRate(Operation):
    """Changes the learning rate of an optimizer, as a scheduler does."""

    optimizer: int
    lr: float


@dataclass(frozen=True)
class WriteWeight(Operation):
    """Overwrites a weight with its initial value, as loading a model does."""

    parameter: str


@dataclass(frozen=True)
class WriteBuffer(Operation):
    """Overwrites the running statistics between two steps, as `update_bn` does."""

    value: float


@dataclass(frozen=True)
class Evaluate(Operation):
    """Scales a validation loss without gradients."""

    loss: float


@dataclass(frozen=True)
class Grad(Operation):
    """Takes the unscaled gradients of a batch by `scaler.grad`, outside of `.grad`."""

    batch: Batch


@dataclass(frozen=True)
class Closure(Operation):
    """A step of an optimizer that evaluates the loss itself."""

    optimizer: int
    batch: Batch


How = Literal["in place", "fresh scaler", "checkpoint", "deepcopy", "pickle"]


@dataclass(frozen=True)
class Save(Operation):
    """Saves and goes on from what was saved.

    Attributes:
        how: `"in place"` loads the scaler's own state; `"fresh scaler"` loads it into a new one; `"checkpoint"` builds
            model, optimizers and scaler anew and loads all of them; the other two copy all of them together.
    """

    how: How


@dataclass(frozen=True)
class Look(Operation):
    """Reads everything that can be read: metrics, state, the last result. Nothing may change."""


@dataclass(frozen=True)
class Program:
    """A setup, and the operations in their order."""

    setup: Setup
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        setup = [f"{item.name}={brief(getattr(self.setup, item.name))}" for item in fields(self.setup)]
        steps = [f"{index:2}: {brief(operation)}" for index, operation in enumerate(self.operations)]
        return "\n  ".join(["Setup:", *setup, "Operations:", *steps])


def brief(value: Any) -> str:
    """Returns a value as code, without the fields that have their defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(map(brief, value))}{',' if len(value) == 1 else ''})"
    if not is_dataclass(value):
        return repr(value)
    given = [item for item in fields(value) if getattr(value, item.name) != item.default]
    named = ", ".join(f"{item.name}={brief(getattr(value, item.name))}" for item in given)
    return f"{type(value).__name__}({named})"
