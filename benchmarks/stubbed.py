"""The simulated device of the tests, with operators that compute nothing: Python and torch's dispatcher are left."""

from functools import partial
from typing import Any

import torch
from tests.torch.sim import device, kernels
from torch import Tensor

_made: dict[Any, Any] = {}
"""The results of operators, by what they were called with."""

_NUMBERS = torch.zeros(1000).unbind()

_compute = kernels.fallback, kernels.to_copy


def install() -> None:
    """Registers the device with torch, for the rest of the process.

    An operator runs once for each kind of arguments. Afterwards it gives the same numbers again, whatever it is given,
    and writes nothing. So tensors must be small, and what they hold means nothing.
    """
    kernels.fallback, kernels.to_copy = _stubbed, _copied
    device.install()
    aten = install.library = torch.library.Library("aten", "IMPL")  # type: ignore[attr-defined]  # it ends with this
    # As on CUDA, one operator: torch would make one for each tensor of a device that it does not know.
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd"):
        short = name.removeprefix("aten::")
        if short.startswith("_foreach_") or short == "stack":
            packet, _, overload = short.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(short, partial(_stacked if short == "stack" else _stubbed, op), "PrivateUse1")


def _stubbed(op: Any, *args: Any, **kwargs: Any) -> Any:
    written = op._schema.name.endswith("_")
    key = (op, *map(_kind, args), *map(_kind, kwargs.values()))
    if key not in _made:
        _made[key] = _stored(_compute[0](op, *args, **kwargs))
    return (args[0] if op._schema.returns else None) if written else _fresh(_made[key])


def _stacked(op: Any, tensors: list[Tensor], dim: int = 0) -> Tensor:
    torch.stack(_NUMBERS[: len(tensors)])  # on every device it makes a view of each first: 40 us for 200
    return _stubbed(op, tensors, dim)


def _copied(tensor: Tensor, **kwargs: Any) -> Tensor:
    key = (_kind(tensor), *map(_kind, kwargs.values()))
    if key not in _made:
        _made[key] = _stored(_compute[1](tensor, **kwargs))
    return _fresh(_made[key])


def _kind(value: Any) -> Any:
    """Returns what the result of an operator depends on here."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return (len(value), *map(_kind, value[:1])) if isinstance(value, list | tuple) else value


def _stored(made: Any) -> Any:
    return (True, kernels.on_host(made)) if kernels.here(made) else (False, made)


def _fresh(stored: tuple[bool, Any]) -> Any:
    """Returns a result: a single tensor as a new one, which autograd may keep, and lists as they are."""
    there, made = stored
    return kernels.on_device(made) if there else made
