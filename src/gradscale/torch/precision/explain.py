"""`explain`: which modules of a model run and are stored in which dtype, and whether a scaler is needed."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradscale.explain import LayerRow, explanation_text, layer_table, merged_rows
from gradscale.torch.checks import check_modules
from gradscale.torch.precision.advice import advice
from gradscale.torch.precision.checks import as_optimizers
from gradscale.torch.precision.compute_dtypes import ModuleDtype, compute_dtypes, dtype_names
from gradscale.torch.precision.optimizer_row import OptimizerRow, optimizer_row, optimizer_table

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. Printed, it is a table.

    Attributes:
        modules: which modules compute in which dtype.
        optimizers: what is stored for each element.
        scaling: whether a scaler is needed, and why.
        warnings: likely mistakes.
    """

    modules: tuple[LayerRow, ...]
    optimizers: tuple[OptimizerRow, ...]
    scaling: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Returns tables of modules and optimizers, the advice on scaling and the warnings."""
        tables = [layer_table("module", self.modules, buffers=True)]
        if self.optimizers:
            tables.append(optimizer_table(self.optimizers))
        return explanation_text(tables, self.scaling, self.warnings)


def explain(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: Any = None,
    *,
    warn: bool = False,
) -> Explanation:
    """Returns which modules of `model` run and are stored in which dtype, and likely mistakes.

        print(explain(model, optimizer, scaler))

    Takes into account what `prepare` has done. For a training loop with a `torch.autocast` block of its own, call it
    inside such a block. Does not run the model. Modules with neither weights nor a rule in autocast are left out.

    Args:
        model: the model, or models.
        optimizer: the optimizer, or optimizers; None reports nothing about them.
        scaler: a `LossScaler` or a `GradScaler`, this package's or torch's; None if there is none.
        warn: emit the warnings as well.
    """
    models = check_modules(model)
    optimizers = as_optimizers(optimizer)
    found = [module for each in models for module in compute_dtypes(each)]
    rows = merged_rows(map(_row, found), _shared_name)
    scaling, mistakes = advice(found, optimizers, scaler)
    for mistake in mistakes if warn else ():
        warnings.warn(mistake, stacklevel=2)
    return Explanation(rows, tuple(map(optimizer_row, optimizers)), scaling, tuple(mistakes))


def _row(found: ModuleDtype) -> tuple[str, LayerRow]:
    """Returns the row of a module, and its name with stars for numbers, which it shares with its siblings."""
    weights = list(found.module.parameters(recurse=False))
    row = LayerRow(
        name=found.name,
        count=1,
        kind=type(found.module).__name__,
        weights=dtype_names(*(weight.dtype for weight in weights)),
        compute_dtype=found.compute_dtype,
        elements=sum(weight.numel() for weight in weights),
        buffers=dtype_names(*(buffer.dtype for buffer in found.module.buffers(recurse=False))),
    )
    # A number that is the whole name, as in a `Sequential`, is kept: a star alone would say nothing.
    return re.sub(r"\b\d+(?=\.)|(?<=\.)\d+\b", "*", found.name), row


def _shared_name(names: Sequence[str]) -> str:
    """Returns the names as one, with a star where they differ.

    >>> _shared_name(["body.0.norm", "body.1.norm"])
    'body.*.norm'
    """
    pieces = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)
