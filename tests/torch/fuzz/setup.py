"""What a program trains, by value: parameters of every kind, optimizers, and the settings of the scaler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gradscale.torch.masters import Storage

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}

HALF = ("float16", "bfloat16")

WIDTH = 3
"""Elements in a row of a sparse parameter."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model.

    Its gradients are whole numbers from -4 to 4 times `2**exponent`: sums of a few of them, and products with powers of
    two, are exact in every dtype.

    Attributes:
        name: its name in the model.
        dtype: its type, a key of `DTYPES`.
        size: its elements; of a sparse one, its rows. 0 makes it empty.
        exponent: of its gradients.
        sparse: whether its gradients are sparse, as those of an embedding.
        through_half: whether the forward pass casts it to FP16, as autocast does, so that its gradients overflow there.
        trained: whether it requires gradients.
    """

    name: str
    dtype: str = "float32"
    size: int = 3
    exponent: int = 0
    sparse: bool = False
    through_half: bool = False
    trained: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return (self.size, WIDTH) if self.sparse else (self.size,)

    @property
    def is_half(self) -> bool:
        """Whether it has 16 bits, and so a master of its own in `MasterWeights`."""
        return self.dtype in HALF

    @property
    def is_complex(self) -> bool:
        """Whether its type is complex."""
        return self.dtype.startswith("complex")


@dataclass(frozen=True)
class OptimizerSetup:
    """An optimizer.

    Attributes:
        kind: a key of `OPTIMIZERS`.
        groups: the names of the parameters of each group.
        storage: how `MasterWeights` stores the low bits of 16-bit weights; None without `MasterWeights`.
        grad_fp32: the argument of `MasterWeights`.
    """

    kind: str
    groups: tuple[tuple[str, ...], ...]
    storage: Storage | None = None
    grad_fp32: bool = False


@dataclass(frozen=True)
class Setup:
    """Everything that is built before the first operation.

    Attributes:
        parameters: those of the model, in its order.
        optimizers: in the order in which operations count them.
        policy: a key of `POLICIES`.
        tied: a parameter that the model holds under a second name; None for none.
        has_model: whether the scaler is given the model.
        on_device: whether the scaler takes the CPU for a device, whose numbers the host may not look at.
        protects_buffers: whether `protect_buffers` is called.
        loss_dtype: the type of every loss.
    """

    parameters: tuple[Parameter, ...]
    optimizers: tuple[OptimizerSetup, ...]
    policy: str = "dynamic"
    tied: str | None = None
    has_model: bool = True
    on_device: bool = False
    protects_buffers: bool = False
    loss_dtype: Literal["bfloat16", "float32", "float64"] = "float32"

    def parameter(self, name: str) -> Parameter:
        """Returns the parameter of that name."""
        return next(parameter for parameter in self.parameters if parameter.name == name)


def names_of(groups: Sequence[Sequence[str]]) -> list[str]:
    """Returns every name in the groups of an optimizer, each once."""
    return list(dict.fromkeys(name for group in groups for name in group))
