"""`explain`: what of a model runs in which precision, what is stored how, and whether a scaler is needed."""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch.checks import check_modules
from gradscale.torch.masters import MasterWeights, bytes_per_parameter
from gradscale.torch.precision.advice import advice
from gradscale.torch.precision.checks import as_optimizers
from gradscale.torch.precision.compute_dtypes import Part, parts, short
from gradscale.torch.precision.explanation import Explanation, ModuleRow, OptimizerRow
from gradscale.torch.precision.levels import HALVES
from gradscale.torch.step.gradients import parameters_of

Optimizer = torch.optim.Optimizer


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
    shares = max(elements, 1)  # parameters may all be empty
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return OptimizerRow(
        kind=_kind(optimizer),
        elements=elements,
        # Step counts are tensors of one element: of no interest here.
        state=short(*_dtypes(value for value in state if value.dim())),
        weight_bytes=sum(map(_bytes, parameters)) / shares,
        master_bytes=_master_bytes(optimizer, parameters) / shares,
        grad_bytes=sum(map(_grad_bytes, parameters)) / shares,
        state_bytes=sum(map(_bytes, state)) / shares,
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
