"""The memory of an optimizer for each element that it trains: a row of `explain`."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscale._table import text_table
from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.compat import grad_dtype
from gradscale.torch.masters import MasterWeights, master_bytes
from gradscale.torch.precision.compute_dtypes import dtype_names
from gradscale.torch.step.gradients import parameters_of

Optimizer = torch.optim.Optimizer

COLUMNS = ("optimizer", "state in", "elements", "weight", "master", "gradient", "state", "bytes in all")


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """The memory of an optimizer, in bytes for each element that it trains.

    Attributes:
        kind: its class.
        elements: how many elements it trains.
        state: dtypes of its state; empty before its first step.
        weight_bytes: bytes of the model's weights.
        master_bytes: bytes of the master weights.
        grad_bytes: bytes of the gradients.
        state_bytes: bytes of the state.
    """

    kind: str
    elements: int
    state: str
    weight_bytes: float
    master_bytes: float
    grad_bytes: float
    state_bytes: float


def optimizer_row(optimizer: Optimizer) -> OptimizerRow:
    """Returns what `optimizer` holds now."""
    parameters = list(parameters_of([optimizer]))
    elements = sum(map(Tensor.numel, parameters))
    divisor = max(elements, 1)  # all parameters may be empty
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return OptimizerRow(
        kind=_kind(optimizer),
        elements=elements,
        # Step counts are tensors of one element, and their dtype is of no interest.
        state=dtype_names(*(value.dtype for value in state if value.dim())),
        weight_bytes=sum(map(_bytes, parameters)) / divisor,
        master_bytes=_master_bytes(optimizer, parameters) / divisor,
        grad_bytes=sum(map(_grad_bytes, parameters)) / divisor,
        state_bytes=sum(map(_bytes, state)) / divisor,
    )


def optimizer_table(rows: Iterable[OptimizerRow]) -> str:
    """Returns a table of optimizers."""
    return text_table(COLUMNS, [_cells(row) for row in rows])


def _cells(row: OptimizerRow) -> list[str]:
    held = [row.weight_bytes, row.master_bytes, row.grad_bytes, row.state_bytes]
    state = row.state or "none before the first step"
    return [row.kind, state, f"{row.elements:,}", *(f"{size:.3g}" for size in (*held, sum(held)))]


def _kind(optimizer: Optimizer) -> str:
    """Returns the class; of one with master weights, also its inner optimizer and its storage.

    >>> _kind(MasterWeights(torch.optim.SGD([torch.zeros(2)]), "kahan"))
    "MasterWeights(SGD, 'kahan')"
    """
    if isinstance(optimizer, MasterWeights):
        return f"MasterWeights({type(optimizer.optimizer).__name__}, {optimizer.storage!r})"
    return type(optimizer).__name__


def _master_bytes(optimizer: Optimizer, parameters: Iterable[Tensor]) -> int:
    if not isinstance(optimizer, MasterWeights):
        return 0
    half_elements = sum(parameter.numel() for parameter in parameters if parameter.dtype in HALF_DTYPES)
    return half_elements * master_bytes(optimizer.storage)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _grad_bytes(parameter: Tensor) -> int:
    if not parameter.requires_grad:
        return 0
    return parameter.numel() * grad_dtype(parameter).itemsize
