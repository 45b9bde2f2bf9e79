"""`explain`: what of a model runs in which precision, what is stored how, and whether a scaler is needed."""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch.advice import advice
from gradscale.torch.checks import check_modules
from gradscale.torch.gradients import parameters_of
from gradscale.torch.masters import MasterWeights, bytes_per_parameter
from gradscale.torch.precision import HALVES
from gradscale.torch.prepare_checks import as_optimizers
from gradscale.torch.runs import Part, parts, short

Optimizer = torch.optim.Optimizer

WIDTH = 120


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """Modules of a model that are alike.

    Attributes:
        name: the name; of several, the names with a star where they differ.
        count: how many they are.
        kind: their class.
        weights: dtypes of their own weights; empty if they have none.
        buffers: dtypes of their own buffers; empty if they have none.
        runs: the dtype they compute in, or that of their input.
        elements: how many elements their weights have together.
    """

    name: str
    count: int
    kind: str
    weights: str
    buffers: str
    runs: str
    elements: int


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """What an optimizer holds, in bytes for each element that it trains.

    Attributes:
        kind: its class.
        elements: how many elements it trains.
        state: dtypes of its state; empty before its first step.
        weight_bytes: bytes of the model's weights.
        master_bytes: bytes kept beside half weights.
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


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. Printed, it is a table.

    Attributes:
        modules: what runs in which precision.
        optimizers: what is stored for each element.
        scaling: whether a scaler is needed, and why.
        warnings: what is likely to be a mistake.
    """

    modules: tuple[ModuleRow, ...]
    optimizers: tuple[OptimizerRow, ...]
    scaling: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Returns tables of modules and optimizers, and what there is to say about scaling."""
        tables = [_table(MODULE_COLUMNS, [_module_cells(row) for row in self.modules])]
        if self.optimizers:
            tables.append(_table(OPTIMIZER_COLUMNS, [_optimizer_cells(row) for row in self.optimizers]))
        told = [f"Scaler: {self.scaling}", *(f"Warning: {warning}" for warning in self.warnings)]
        return "\n".join([*tables, *told])


def explain(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: Any = None,
    *,
    warn: bool = False,
) -> Explanation:
    """Returns what of `model` runs and is stored in which precision, and what is likely to be a mistake.

        print(explain(model, optimizer, scaler))

    Knows what `prepare` has done. A model that runs under `torch.autocast` in a loop of your own is to be explained
    inside such a block. Runs nothing; modules that have neither weights nor a place in autocast's lists are left out.

    Args:
        model: the model, or models.
        optimizer: the optimizer, or optimizers; None tells nothing about what they hold.
        scaler: a `LossScaler` or a `GradScaler`, this package's or torch's; None if there is none.
        warn: emit the warnings as well.
    """
    models = check_modules(model)
    optimizers = as_optimizers(optimizer)
    found = [part for each in models for part in parts(each)]
    scaling, mistakes = advice(found, optimizers, scaler)
    for mistake in mistakes if warn else ():
        warnings.warn(mistake, stacklevel=2)
    return Explanation(_module_rows(found), tuple(map(_optimizer_row, optimizers)), scaling, tuple(mistakes))


def _module_rows(found: Iterable[Part]) -> tuple[ModuleRow, ...]:
    """Returns a row for all modules that are alike and whose names differ in numbers only."""
    alike: defaultdict[tuple[str, ...], list[Part]] = defaultdict(list)
    for part in found:
        module = part.module
        dtypes = short(*_dtypes(module.parameters(recurse=False))), short(*_dtypes(module.buffers(recurse=False)))
        # A number that is all of a name, as in a `Sequential`, is kept: a mere star would tell nothing.
        alike[re.sub(r"\b\d+(?=\.)|(?<=\.)\d+\b", "*", part.name), type(module).__name__, *dtypes, part.runs].append(
            part
        )
    return tuple(
        ModuleRow(
            name=_shared_name([part.name for part in group]),
            count=len(group),
            kind=kind,
            weights=weights,
            buffers=buffers,
            runs=runs,
            elements=sum(weight.numel() for part in group for weight in part.module.parameters(recurse=False)),
        )
        for (_, kind, weights, buffers, runs), group in alike.items()
    )


def _shared_name(names: Sequence[str]) -> str:
    """Returns the names as one, with a star where they differ.

    >>> _shared_name(["body.0.norm", "body.1.norm"])
    'body.*.norm'
    """
    pieces = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


def _dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors}


def _optimizer_row(optimizer: Optimizer) -> OptimizerRow:
    parameters = list(parameters_of([optimizer]))
    elements = sum(map(Tensor.numel, parameters))
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return OptimizerRow(
        kind=_kind(optimizer),
        elements=elements,
        # Step counts are tensors of one element: of no interest here.
        state=short(*_dtypes(value for value in state if value.dim())),
        weight_bytes=sum(map(_bytes, parameters)) / elements,
        master_bytes=_master_bytes(optimizer, parameters) / elements,
        grad_bytes=sum(map(_grad_bytes, parameters)) / elements,
        state_bytes=sum(map(_bytes, state)) / elements,
    )


def _kind(optimizer: Optimizer) -> str:
    """Returns the class; of one that keeps masters, also what is inside and how.

    >>> _kind(MasterWeights(torch.optim.SGD([torch.zeros(2)]), "kahan"))
    "MasterWeights(SGD, 'kahan')"
    """
    if isinstance(optimizer, MasterWeights):
        return f"MasterWeights({type(optimizer.optimizer).__name__}, {optimizer.kind!r})"
    return type(optimizer).__name__


def _master_bytes(optimizer: Optimizer, parameters: Iterable[Tensor]) -> int:
    if not isinstance(optimizer, MasterWeights):
        return 0
    weight_and_gradient = 4
    halves = sum(parameter.numel() for parameter in parameters if parameter.dtype in HALVES)
    return halves * (bytes_per_parameter(optimizer.kind) - weight_and_gradient)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _grad_bytes(parameter: Tensor) -> int:
    if not parameter.requires_grad:
        return 0
    return parameter.numel() * (parameter.grad_dtype or parameter.dtype).itemsize


MODULE_COLUMNS = ("module", "class", "weights", "buffers", "runs in", "elements")
OPTIMIZER_COLUMNS = ("optimizer", "state in", "elements", "weight", "master", "gradient", "state", "bytes in all")


def _module_cells(row: ModuleRow) -> list[str]:
    name = row.name or "(the model itself)"
    shown = f"{name} ({row.count})" if row.count > 1 else name
    return [shown, row.kind, row.weights, row.buffers, row.runs, f"{row.elements:,}"]


def _optimizer_cells(row: OptimizerRow) -> list[str]:
    held = [row.weight_bytes, row.master_bytes, row.grad_bytes, row.state_bytes]
    state = row.state or "none before the first step"
    return [row.kind, state, f"{row.elements:,}", *(f"{size:.3g}" for size in (*held, sum(held)))]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=WIDTH, highlight=False, markup=False, emoji=False, color_system=None).print(table)
    return "\n".join(line.strip() for line in text.getvalue().strip().splitlines()) + "\n"
