"""The input/output cast of a module: its inputs and outputs are cast, and autocast is set for the call between."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from gradscale.torch.cast import HALF_DTYPES, cast

CASTABLE = (torch.float32, *HALF_DTYPES)
"""Dtypes that are cast. Integers, float64, complex and FP8 tensors are not: a model uses them on purpose."""


@dataclass(frozen=True, slots=True)
class InputOutputCast:
    """The casts around a call of a module.

    Attributes:
        inputs: dtype that inputs are cast to; None leaves them as they are.
        autocast: dtype of `torch.autocast` during the call; `torch.float32` disables it; None leaves it as it is.
        outputs: dtype that outputs are cast to; None leaves them as they are.
        precision: what the module was prepared with, if it is a whole model; None for a submodule.
    """

    inputs: torch.dtype | None
    autocast: torch.dtype | None
    outputs: torch.dtype | None
    precision: Any = None

    def context(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Returns the context that `module` runs in."""
        if self.autocast is None:
            return nullcontext()
        device = device_type(module)
        if self.autocast is torch.float32:
            return torch.autocast(device, enabled=False)
        return torch.autocast(device, dtype=self.autocast)


class CastModule(nn.Module):
    """The base that `set_input_output_cast` adds to the class of a module."""

    # A class, not a wrapper: the module stays the same object with the same names in its `state_dict`, and copies and
    # pickles keep the cast. A `forward` that is replaced on the object would, in a copy, still run the original module.
    # For a new module that is built by calling the class of another, `type(model)(...)`: it has no cast of its own.
    _gradscale_cast = InputOutputCast(None, None, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns how to copy or pickle the module: by its original class, as the derived one cannot be imported."""
        make, args, *rest = super().__reduce_ex__(protocol)
        original = tuple(original_class(type(self)) if arg is type(self) else arg for arg in args)
        return (_rebuilt, (self._gradscale_cast, make, original), *rest)


def set_input_output_cast(module: nn.Module, how: InputOutputCast) -> None:
    """Applies the cast to every call of `module`. Changes its class to a subclass of the same name."""
    module.__class__ = _cast_class(original_class(type(module)))
    module._gradscale_cast = how  # type: ignore[assignment]


def input_output_cast_of(module: nn.Module) -> InputOutputCast | None:
    """Returns the input/output cast of a module, or None if it has none."""
    return vars(module).get("_gradscale_cast")


def original_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that a module had before it got an input/output cast."""
    return kind.__mro__[kind.__mro__.index(CastModule) + 1] if issubclass(kind, CastModule) else kind


def device_type(module: nn.Module) -> str:
    """Returns the type of the device that a module is on."""
    # Not stored: the module may move between calls.
    for parameter in module.parameters():
        return parameter.device.type
    return "cpu"


@cache
def _cast_class(kind: type[nn.Module]) -> type[nn.Module]:
    run = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        how: InputOutputCast = self._gradscale_cast
        if how.inputs is not None:
            args, kwargs = cast(args, how.inputs, CASTABLE), cast(kwargs, how.inputs, CASTABLE)
        with how.context(self):
            outputs = run(self, *args, **kwargs)
        return outputs if how.outputs is None else cast(outputs, how.outputs, CASTABLE)

    # `torch.compile` counts recompilations by code object, and gives up after a few: every class gets its own.
    forward.__code__ = forward.__code__.replace()
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (CastModule, kind), {"forward": wraps(run)(forward), **names})


def _rebuilt(how: InputOutputCast, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = make(*args)
    set_input_output_cast(module, how)
    return module
