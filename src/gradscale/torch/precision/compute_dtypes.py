"""In which precision each module of a model runs, from its weights, its borders and the lists of autocast."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gradscale.torch.precision.input_output_cast import border_of

FOLLOWS = "its input"

HALF = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.PReLU, nn.RNNBase, nn.RNNCellBase)
"""Modules that autocast runs in half precision on every device. On a CPU some recurrent ones return float32: only
their products are half."""

FLOAT_ON_ACCELERATORS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softplus),
    nn.modules.loss._Loss,
)
"""Modules that autocast runs in float32 on an accelerator. On a CPU their kernels sum in float32 instead."""

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Modules that return their weights as they are."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module inside a model.

    Attributes:
        name: its name there.
        module: the module itself.
        runs: the dtype that it computes in, or `FOLLOWS`.
    """

    name: str
    module: nn.Module
    runs: str


def parts(model: nn.Module) -> Iterator[Part]:
    """Yields the modules of `model` that own weights or buffers, or that autocast treats in a way of their own.

    Seen as if it were called here and now: inside a `torch.autocast` block, that is taken into account.
    """
    first = next(model.parameters(), None)
    device = "cpu" if first is None else first.device.type
    outside = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    yield from _parts(model, "", device, outside)


def _parts(module: nn.Module, name: str, device: str, autocast: torch.dtype | None) -> Iterator[Part]:
    border = border_of(module)
    if border is not None and border.autocast is not None:
        autocast = None if border.autocast is torch.float32 else border.autocast
    owns = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    runs = _runs(module, device, autocast)
    if border is not None and border.inputs is torch.float32:
        runs = short(torch.float32)
    if owns or runs != FOLLOWS:
        yield Part(name, module, runs)
    for child_name, child in module.named_children():
        yield from _parts(child, f"{name}.{child_name}" if name else child_name, device, autocast)


def _runs(module: nn.Module, device: str, autocast: torch.dtype | None) -> str:
    if autocast is not None and not isinstance(module, LOOKUPS):
        return _runs_under_autocast(module, device, autocast)
    weights = {weight.dtype for weight in module.parameters(recurse=False) if weight.is_floating_point()}
    return short(*weights) if weights else FOLLOWS


def _runs_under_autocast(module: nn.Module, device: str, autocast: torch.dtype) -> str:
    if isinstance(module, HALF):
        return short(autocast)
    return "float32" if device != "cpu" and isinstance(module, FLOAT_ON_ACCELERATORS) else FOLLOWS


def short(*dtypes: torch.dtype) -> str:
    """Returns the names of dtypes as a person writes them.

    >>> short(torch.float16), short(torch.float32, torch.bfloat16)
    ('float16', 'bfloat16 and float32')
    """
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in set(dtypes)))
