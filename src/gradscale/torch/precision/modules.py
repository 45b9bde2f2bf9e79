"""The rows of modules in `explain`: the dtypes that they store, and the one that each computes in."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradscale.explain import LayerRow
from gradscale.torch.compat import autocast_widens
from gradscale.torch.precision.casts import InputOutputCast, device_type, input_output_cast_of
from gradscale.torch.wrappers import is_added, own_module

ModuleRow = tuple[nn.Module, LayerRow]

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


def module_rows(model: nn.Module) -> Iterator[ModuleRow]:
    """Yields the modules of `model` that own weights or buffers, or that autocast has a rule for, with their rows.

    For a call of the model at this point: an enclosing `torch.autocast` block is taken into account.
    """
    device = device_type(model)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    yield from _rows_inside(own_module(model), "", device, autocast)


def _rows_inside(module: nn.Module, name: str, device: str, autocast: torch.dtype | None) -> Iterator[ModuleRow]:
    how = input_output_cast_of(module) or InputOutputCast(None, None, None)
    if how.autocast is not None:
        autocast = None if how.autocast is torch.float32 else how.autocast
    computes_in = "float32" if how.inputs is torch.float32 else _compute_dtype(module, device, autocast)
    weights, buffers = list(module.parameters(recurse=False)), list(module.buffers(recurse=False))
    if computes_in != LIKE_INPUT or weights or buffers:
        row = LayerRow(
            name=name,
            count=1,
            kind=type(module).__name__,
            weights=dtype_names(*(weight.dtype for weight in weights)),
            compute_dtype=computes_in,
            elements=sum(map(Tensor.numel, weights)),
            buffers=dtype_names(*(buffer.dtype for buffer in buffers)),
        )
        yield module, row
    for child_name, child in module.named_children():
        inner = name if is_added(module, child_name) else f"{name}.{child_name}" if name else child_name
        yield from _rows_inside(child, inner, device, autocast)


def _compute_dtype(module: nn.Module, device: str, autocast: torch.dtype | None) -> str:
    if autocast is None or isinstance(module, LOOKUPS):
        weights = {weight.dtype for weight in module.parameters(recurse=False) if weight.is_floating_point()}
        return dtype_names(*weights) or LIKE_INPUT
    if isinstance(module, HALF):
        return dtype_names(autocast)
    return "float32" if device != "cpu" and isinstance(module, FLOAT32_ON_ACCELERATORS) else LIKE_INPUT


def dtype_names(*dtypes: torch.dtype) -> str:
    """Returns the names of dtypes, without "torch." and each once.

    >>> dtype_names(torch.float16), dtype_names(torch.float32, torch.bfloat16)
    ('float16', 'bfloat16 and float32')
    """
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in set(dtypes)))
