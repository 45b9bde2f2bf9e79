"""The dtype that each module of a model computes in: from its weights, its input/output cast and autocast's lists."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from gradscale.torch.compat import autocast_widens
from gradscale.torch.precision.input_output_cast import device_type, input_output_cast_of
from gradscale.torch.wrappers import is_added, own_module

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
class ModuleDtype:
    """A module of a model, and the dtype it computes in.

    Attributes:
        name: its name in the model.
        module: the module itself.
        compute_dtype: the name of the dtype, or `LIKE_INPUT`.
    """

    name: str
    module: nn.Module
    compute_dtype: str


def compute_dtypes(model: nn.Module) -> Iterator[ModuleDtype]:
    """Yields the modules of `model` that own weights or buffers, or that autocast has a rule for.

    For a call of the model at this point: an enclosing `torch.autocast` block is taken into account.
    """
    device = device_type(model)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    yield from _compute_dtypes(own_module(model), "", device, autocast)


def _compute_dtypes(module: nn.Module, name: str, device: str, autocast: torch.dtype | None) -> Iterator[ModuleDtype]:
    how = input_output_cast_of(module)
    if how is not None and how.autocast is not None:
        autocast = None if how.autocast is torch.float32 else how.autocast
    if how is not None and how.inputs is torch.float32:
        found = "float32"
    else:
        found = _compute_dtype(module, device, autocast)
    owned = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    if found != LIKE_INPUT or next(owned, None) is not None:
        yield ModuleDtype(name, module, found)
    for child_name, child in module.named_children():
        added = is_added(module, child_name)
        inner = name if added else f"{name}.{child_name}" if name else child_name
        yield from _compute_dtypes(child, inner, device, autocast)


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
