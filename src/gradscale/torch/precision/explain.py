"""`explain`: which modules of a model run and are stored in which dtype, and whether a scaler is needed."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale._table import text_table
from gradscale.explain import LayerRow, explanation_text, layer_table, merged_rows, scaler_warning, scaling_advice
from gradscale.formats import FP16
from gradscale.policies.static import multiplies
from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.checks import check_modules
from gradscale.torch.compat import autocast_widens, grad_dtype
from gradscale.torch.masters import MasterWeights, master_bytes
from gradscale.torch.precision.casts import NORMS, InputOutputCast, device_type, input_output_cast_of
from gradscale.torch.precision.prepare import as_optimizers, lost_eps
from gradscale.torch.step.gradients import parameters_of
from gradscale.torch.wrappers import is_added, own_module

ModuleRow = tuple[nn.Module, LayerRow]

COLUMNS = ("optimizer", "state in", "elements", "weight", "master", "gradient", "state", "bytes in all")
ADD_SCALER = "Train it with `LossScaler(model)`, or use BF16."
REMOVE_SCALER = "Use `LossScaler(model, NoScaling())` or none."

LIKE_INPUT = "its input"

HALF = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.PReLU, nn.RNNBase, nn.RNNCellBase)
"""Modules that autocast runs in half precision on every device. On a CPU some recurrent ones return float32: only
their products are half."""

FLOAT32_ON_ACCELERATORS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softplus),
    *((nn.RMSNorm,) if autocast_widens("rms_norm") else ()),
    nn.modules.loss._Loss,
)
"""Modules that autocast runs in float32 on an accelerator. On a CPU their kernels sum in float32 instead."""

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Modules that return their weights unchanged, whatever autocast is set to."""


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

    def cells(self) -> list[str]:
        """Returns the row as text."""
        kind, elements, state, *held = astuple(self)
        sizes = [f"{size:.3g}" for size in (*held, sum(held))]
        return [kind, state or "none before the first step", f"{elements:,}", *sizes]


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
            tables.append(text_table(COLUMNS, [row.cells() for row in self.optimizers]))
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
    scaler_mistake = scaler_warning(scaling, scales=_scales(scaler), add=ADD_SCALER, remove=REMOVE_SCALER)
    mistakes = tuple(filter(None, [scaler_mistake, *_mistakes(found, optimizers)]))
    for mistake in mistakes if warn else ():
        warnings.warn(mistake, stacklevel=2)
    # Numbers become stars. One that is the whole name, as in a `Sequential`, is kept: a star alone would say nothing.
    patterns = ((re.sub(r"\b\d+(?=\.)|(?<=\.)\d+\b", "*", row.name), row) for _, row in found)
    rows = merged_rows(patterns, _shared_name)
    return Explanation(rows, tuple(map(_optimizer_row, optimizers)), scaling, mistakes)


def _shared_name(names: Sequence[str]) -> str:
    """Returns the names as one, with a star where they differ.

    >>> _shared_name(["body.0.norm", "body.1.norm"])
    'body.*.norm'
    """
    pieces = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


def module_rows(model: nn.Module) -> Iterator[ModuleRow]:
    """Yields the modules of `model` that own weights or buffers, or that autocast has a rule for, with their rows.

    For a call of the model at this point: an enclosing `torch.autocast` block is taken into account.
    """
    device = device_type(model)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    yield from _rows_inside(own_module(model), "", device, autocast)


def _rows_inside(module: nn.Module, name: str, device: str, autocast: torch.dtype | None) -> Iterator[ModuleRow]:
    how = input_output_cast_of(module) or InputOutputCast()
    if how.autocast is not None:
        autocast = None if how.autocast is torch.float32 else how.autocast
    computes_in = "float32" if how.inputs is torch.float32 else _compute_dtype(module, device, autocast)
    weights, buffers = list(module.parameters(recurse=False)), list(module.buffers(recurse=False))
    if computes_in != LIKE_INPUT or weights or buffers:
        row = LayerRow(
            name=name,
            count=1,
            kind=type(module).__name__,
            weights=_dtypes(weights),
            compute_dtype=computes_in,
            elements=sum(map(Tensor.numel, weights)),
            buffers=_dtypes(buffers),
        )
        yield module, row
    for child_name, child in module.named_children():
        inner = name if is_added(module, child_name) else f"{name}.{child_name}" if name else child_name
        yield from _rows_inside(child, inner, device, autocast)


def _compute_dtype(module: nn.Module, device: str, autocast: torch.dtype | None) -> str:
    if autocast is None or isinstance(module, LOOKUPS):
        return _dtypes(own for own in module.parameters(recurse=False) if own.is_floating_point()) or LIKE_INPUT
    if isinstance(module, HALF):
        return str(autocast).removeprefix("torch.")
    return "float32" if device != "cpu" and isinstance(module, FLOAT32_ON_ACCELERATORS) else LIKE_INPUT


def _dtypes(tensors: Iterable[Tensor]) -> str:
    """Returns the names of the dtypes of tensors, each once.

    >>> _dtypes([torch.ones(1), torch.ones(1).bfloat16(), torch.ones(1)])
    'bfloat16 and float32'
    """
    return " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def _optimizer_row(optimizer: Optimizer) -> OptimizerRow:
    """Returns what `optimizer` holds now."""
    parameters = list(parameters_of([optimizer]))
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    kind, masters = type(optimizer).__name__, 0
    if isinstance(optimizer, MasterWeights):
        kind = f"MasterWeights({type(optimizer.optimizer).__name__}, {optimizer.storage!r})"
        half_elements = sum(each.numel() for each in parameters if each.dtype in HALF_DTYPES)
        masters = half_elements * master_bytes(optimizer.storage)
    elements = sum(map(Tensor.numel, parameters))
    divisor = max(elements, 1)  # all parameters may be empty
    return OptimizerRow(
        kind=kind,
        elements=elements,
        # Step counts are tensors of one element, and their dtype is of no interest.
        state=_dtypes(value for value in state if value.dim()),
        weight_bytes=sum(each.numel() * each.element_size() for each in parameters) / divisor,
        master_bytes=masters / divisor,
        grad_bytes=sum(each.numel() * grad_dtype(each).itemsize for each in parameters if each.requires_grad) / divisor,
        state_bytes=sum(value.numel() * value.element_size() for value in state) / divisor,
    )


def _scales(scaler: Any) -> bool:
    """Returns whether `scaler`, a `LossScaler` or a `GradScaler` or None, multiplies losses by a scale."""
    if scaler is None:
        return False
    enabled: Callable[[], bool] | None = getattr(scaler, "is_enabled", None)
    return multiplies(scaler.policy) if enabled is None else enabled() and getattr(scaler, "_multiplies", True)


def _mistakes(modules: Sequence[ModuleRow], optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Yields warnings of dtypes that are likely to be a mistake."""
    if half := [row.name for module, row in modules if isinstance(module, NORMS) and _changes_in_half(module)]:
        yield (
            f"{len(half)} norm layers store weights or statistics in half precision, such as {half[0]!r}: small "
            "changes of them are lost. Keep them float32 with `keep_norm_fp32=True`."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, MasterWeights):
            continue
        kind = type(optimizer).__name__
        if count := sum(each.requires_grad and each.dtype in HALF_DTYPES for each in parameters_of([optimizer])):
            yield (
                f"{kind} updates {count} half-precision parameters with no master weights: updates below half a unit "
                "in the last place are lost. Use `MasterWeights(optimizer)`, or float32 weights under autocast."
            )
        if (eps := lost_eps(optimizer)) is not None:
            yield (
                f"{kind} keeps squares of gradients in FP16. Those below {FP16.smallest_subnormal:.1e} are 0, and it "
                f"divides by eps={eps:g} alone, or by 0 where that is rounded to FP16 too. Use "
                "`MasterWeights(optimizer)`, or a larger `eps`."
            )


def _changes_in_half(norm: nn.Module) -> bool:
    """Returns whether a norm layer has half-precision weights that are trained, or statistics that are updated."""
    trained = [weight for weight in norm.parameters(recurse=False) if weight.requires_grad]
    statistics = norm.buffers(recurse=False) if norm.training else ()
    return any(changed.dtype in HALF_DTYPES for changed in (*trained, *statistics))
