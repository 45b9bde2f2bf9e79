"""`explain`: which modules of a model run and are stored in which dtype, and whether a scaler is needed."""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.explain import LayerRow, explanation_text, layer_table, merged_rows, scaler_warning, scaling_advice
from gradscale.policies.static import multiplies
from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.checks import check_modules
from gradscale.torch.gradients import parameters_of
from gradscale.torch.masters import MasterWeights
from gradscale.torch.precision.casts import NORMS, InputOutputCast, device_type, input_output_cast_of
from gradscale.torch.precision.prepare import as_optimizers
from gradscale.torch.wrappers import own_module, own_name

ModuleRow = tuple[nn.Module, LayerRow]

ADD_SCALER = "Train it with `LossScaler(model)`, or use BF16."
REMOVE_SCALER = "Use `LossScaler(model, NoScaling())` or none."

LIKE_INPUT = "its input"

HALF = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.PReLU, nn.RNNBase, nn.RNNCellBase)
"""Modules that autocast runs in half precision on every device. On a CPU some recurrent ones return float32: only
their products are half."""

FLOAT32_ON_ACCELERATORS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softplus, nn.modules.loss._Loss),
)
"""Modules that autocast runs in float32 on an accelerator. On a CPU their kernels sum in float32 instead."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. Printed, it is a table.

    Attributes:
        modules: which modules compute in which dtype.
        optimizers: class of each optimizer; of `MasterWeights`, with its inner optimizer and the storage.
        scaling: whether a scaler is needed, and why.
        warnings: likely mistakes.
    """

    modules: tuple[LayerRow, ...]
    optimizers: tuple[str, ...]
    scaling: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Returns a table of modules, the optimizers, the advice on scaling and the warnings."""
        optimizers = (f"Optimizer: {optimizer}" for optimizer in self.optimizers)
        tables = [layer_table("module", self.modules, buffers=True), *optimizers]
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
    models, optimizers = check_modules(model), as_optimizers(optimizer)
    found = [module_row for each in models for module_row in module_rows(each)]
    trained = {_dtypes([weight]) for each in models for weight in each.parameters() if weight.requires_grad}
    scaling = scaling_advice(trained | {row.compute_dtype for _, row in found})
    # A `LossScaler` has a policy; drop-ins, this package's and torch's, can be disabled.
    is_enabled = getattr(scaler, "is_enabled", lambda: scaler is not None and multiplies(scaler.policy))
    scales = is_enabled() and getattr(scaler, "_multiplies", True)
    scaler_mistake = scaler_warning(scaling, scales=scales, add=ADD_SCALER, remove=REMOVE_SCALER)
    mistakes = tuple(filter(None, [scaler_mistake, *_mistakes(found, optimizers)]))
    for mistake in mistakes if warn else ():
        warnings.warn(mistake, stacklevel=2)
    # Numbers become stars. One that is the whole name, as in a `Sequential`, is kept: a star alone would say nothing.
    patterns = ((re.sub(r"\b\d+(?=\.)|(?<=\.)\d+\b", "*", row.name), row) for _, row in found)
    rows = merged_rows(patterns, _shared_name)
    return Explanation(rows, tuple(map(_kind, optimizers)), scaling, mistakes)


def _shared_name(names: Sequence[str]) -> str:
    """Returns "body.*.norm" for "body.0.norm" and "body.1.norm"."""
    pieces = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


def module_rows(model: nn.Module) -> Iterator[ModuleRow]:
    """Yields the modules that own weights or buffers, or that autocast has a rule for, for a call at this point."""
    device = device_type(model)
    widened = () if device == "cpu" else FLOAT32_ON_ACCELERATORS

    def rows(module: nn.Module, name: str, autocast: torch.dtype | None) -> Iterator[ModuleRow]:
        how = input_output_cast_of(module) or InputOutputCast()
        if how.autocast is not None:
            autocast = None if how.autocast is torch.float32 else how.autocast
        weights, buffers = list(module.parameters(recurse=False)), list(module.buffers(recurse=False))
        if how.inputs is torch.float32:
            computes_in = "float32"
        elif autocast is None or isinstance(module, nn.Embedding | nn.EmbeddingBag):  # these return weights unchanged
            computes_in = _dtypes(own for own in weights if own.is_floating_point()) or LIKE_INPUT
        elif isinstance(module, HALF):
            computes_in = str(autocast).removeprefix("torch.")
        else:
            computes_in = "float32" if isinstance(module, widened) else LIKE_INPUT
        if computes_in != LIKE_INPUT or weights or buffers:
            elements, kind = sum(map(Tensor.numel, weights)), type(module).__name__
            yield module, LayerRow(name, 1, kind, _dtypes(weights), computes_in, elements, _dtypes(buffers))
        for child_name, child in module.named_children():
            yield from rows(child, own_name(f"{name}.{child_name}" if name else child_name), autocast)

    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return rows(own_module(model), "", autocast)


def _dtypes(tensors: Iterable[Tensor]) -> str:
    """Returns the names of the dtypes of tensors, each once."""
    return " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def _kind(optimizer: Optimizer) -> str:
    """Returns the class of the optimizer."""
    if isinstance(optimizer, MasterWeights):
        return f"MasterWeights({type(optimizer.optimizer).__name__}, {optimizer.storage!r})"
    return type(optimizer).__name__


def _mistakes(modules: Sequence[ModuleRow], optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Yields warnings of dtypes that are likely to be a mistake."""

    def is_half(norm: nn.Module) -> bool:
        trained = [weight for weight in norm.parameters(recurse=False) if weight.requires_grad]
        statistics = norm.buffers(recurse=False) if norm.training else ()
        return any(changed.dtype in HALF_DTYPES for changed in (*trained, *statistics))

    if norms := [row.name for module, row in modules if isinstance(module, NORMS) and is_half(module)]:
        yield (
            f"{len(norms)} norm layers store weights or statistics in half precision, such as {norms[0]!r}: small "
            "changes of them are lost. Keep them float32 with `keep_norm_fp32=True`."
        )
    for optimizer in (each for each in optimizers if not isinstance(each, MasterWeights)):
        if count := sum(each.requires_grad and each.dtype in HALF_DTYPES for each in parameters_of([optimizer])):
            yield (
                f"{_kind(optimizer)} updates {count} half-precision parameters with no master weights: updates below "
                "half a unit in the last place are lost. Use `MasterWeights(optimizer)`, or float32 weights under "
                "autocast."
            )
