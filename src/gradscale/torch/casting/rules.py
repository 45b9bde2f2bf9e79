"""Rules for calls of functions: the rule that casts arguments, and which rules hold in which thread."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gradscale.torch.cast import cast, tensors_in
from gradscale.torch.casting.aliases import Function

AUTOCAST_DTYPES = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
) - {torch.float64}
"""Dtypes that are cast: the same as by autocast, which leaves float64 alone."""


class Rule(Protocol):
    """How calls of a function are run."""

    def run(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, op: bool) -> Any:
        """Returns the result of the call. `op` is whether `function` is a torch operation, not a Python function."""
        ...


Rules = dict[Function, Rule]


@dataclass(frozen=True, slots=True)
class Cast:
    """A rule that casts the floating-point arguments. Gradients have the dtypes that the arguments had.

    Attributes:
        to: `"half"`, `"float"` (float32), or `"promote"`: the widest dtype among the arguments.
        dtype: the half dtype; None is autocast's own where autocast is enabled, and FP16 elsewhere.
    """

    to: Literal["half", "float", "promote"]
    dtype: torch.dtype | None = None

    def run(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, op: bool) -> Any:
        """Returns the result of the call with cast arguments."""
        # `out` of an operation is not cast: the result would be written to the copy.
        inputs = {key: value for key, value in kwargs.items() if not (op and key == "out")}
        tensors = floating(args, inputs)
        if not tensors:
            return function(*args, **kwargs)
        args, inputs = cast((args, inputs), self._target(tensors), AUTOCAST_DTYPES)
        # Autocast would cast the inputs of an operation once more. A Python function keeps it, since autocast casts the
        # weights that the function uses beside its arguments, unless it is to run in float32 altogether.
        devices = autocast_devices(tensors) if op or self.to == "float" else []
        return without_autocast(devices, function, args, {**kwargs, **inputs})

    def _target(self, tensors: list[Tensor]) -> torch.dtype:
        if self.to == "promote":
            return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        if self.to == "float":
            return torch.float32
        device = tensors[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float16
        return self.dtype or autocast


def floating(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the floating-point tensors among arguments, and in nested containers of them."""
    return [tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value) if tensor.is_floating_point()]


def autocast_devices(tensors: Iterable[Tensor]) -> list[str]:
    """Returns the device types of the tensors for which autocast is enabled."""
    return [device for device in {tensor.device.type for tensor in tensors} if torch.is_autocast_enabled(device)]


def without_autocast(devices: Sequence[str], function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a call with autocast disabled on some device types."""
    # One block in the other, and no `ExitStack`, which the compiler of torch 2.6 does not trace.
    if not devices:
        return function(*args, **kwargs)
    with torch.autocast(devices[0], enabled=False):
        return without_autocast(devices[1:], function, args, kwargs)


class _Active(threading.local):
    """The rules of each context that this thread is in, innermost last, with those of the outer contexts included."""

    def __init__(self) -> None:
        self.stack: list[Rules] = []


_ACTIVE = _Active()


def current() -> Rules | None:
    """Returns the rules that hold in this thread; None outside of every context."""
    return _ACTIVE.stack[-1] if _ACTIVE.stack else None


def rule_for(function: Function) -> Rule | None:
    """Returns the rule that holds for a function in this thread."""
    return _ACTIVE.stack[-1].get(function) if _ACTIVE.stack else None


def push(rules: Rules) -> None:
    """Replaces the rules of this thread by `rules`."""
    _ACTIVE.stack.append(rules)


def pop() -> None:
    """Restores the rules from before the last `push`."""
    _ACTIVE.stack.pop()
