"""The casts of `prepare`: of weights once, and of the inputs and outputs of modules at every call."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, wraps
from itertools import chain
from typing import Any

import torch
from torch import nn

from gradscale.torch.cast import HALF_DTYPES, cast
from gradscale.torch.precision.levels import Precision

CASTABLE = (torch.float32, *HALF_DTYPES)
"""Dtypes of inputs and outputs that are cast. Integers, float64, complex and FP8 are not: they are there on purpose."""

MIXED_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Norm layers whose kernels take half activations with float32 weights, on every device, and compute in float32."""

NORMS = (*MIXED_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class InputOutputCast:
    """The casts around a call of a module: dtypes of its inputs, of `torch.autocast` inside, and of its outputs.

    None leaves each as it is. `torch.float32` disables autocast.
    """

    inputs: torch.dtype | None = None
    autocast: torch.dtype | None = None
    outputs: torch.dtype | None = None


def plan_casts(
    models: Sequence[nn.Module], precision: Precision
) -> tuple[set[nn.Module], dict[nn.Module, InputOutputCast]]:
    """Returns the modules whose own weights become half, and the casts around the calls of modules."""
    half = precision.compute if precision.half_weights else None
    modules, float32, norms = _all(models), _kept(models, precision), set[nn.Module]()
    if precision.keep_norm_fp32 and precision.compute is not torch.float32:
        norms = {module for module in modules.difference(models) if isinstance(module, NORMS)}
    to_half = set[nn.Module]()
    if half is not None:
        weights = set(chain.from_iterable(module.parameters() for module in float32 | norms))
        # A module that shares a weight with one that stays float32 must stay float32 too.
        float32 |= {each for each in modules if not weights.isdisjoint(each.parameters(recurse=False))} - norms
        to_half = modules - _all(float32 | norms)
    # Autocast runs norm layers in float32 on some devices only; with a cast of their own they do on all. What is inside
    # a module that stays float32 needs none.
    called = float32 | {norm for norm in norms if not isinstance(norm, MIXED_NORMS)}
    called -= _all(child for module in float32 for child in module.children())
    casts = dict.fromkeys(called, InputOutputCast(torch.float32, torch.float32, half))
    whole = InputOutputCast(half, precision.compute if precision.autocast else None, precision.output)
    return to_half, casts | dict.fromkeys(models, whole)


def _all(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns the modules and all their submodules."""
    return {each for module in modules for each in module.modules()}


def _kept(models: Sequence[nn.Module], precision: Precision) -> set[nn.Module]:
    """Returns the modules that `keep_fp32` names; of a `ModuleList` or `ModuleDict`, those in it."""
    inside = [(name, each) for model in models for name, each in model.named_modules(remove_duplicate=False) if name]
    patterns = [entry for entry in precision.keep_fp32 if isinstance(entry, str)]
    types = tuple(entry for entry in precision.keep_fp32 if not isinstance(entry, str))
    if unknown := [entry for entry in patterns if not any(fnmatchcase(name, entry) for name, _ in inside)]:
        raise ValueError(
            "Every name pattern in `keep_fp32` must match a module, as `model.named_modules()` names them. "
            f"Received: {', '.join(map(repr, unknown))}, which match none."
        )
    found = [each for name, each in inside if isinstance(each, types) or any(fnmatchcase(name, p) for p in patterns)]
    for module in found:
        if type(module).forward is nn.Module.forward:  # is never called itself
            found += module.children()
    return {module for module in found if type(module).forward is not nn.Module.forward}


class CastModule(nn.Module):
    """The base that `set_input_output_cast` adds to the class of a module."""

    # A class, not a wrapper: the module stays the same object with the same names in its `state_dict`, and copies and
    # pickles keep the cast. A `forward` that is replaced on the object would, in a copy, still run the original module.
    _gradscale_original: type[nn.Module]
    # For a new module that is built by calling the class of another, `type(model)(...)`: it has no cast of its own.
    _gradscale_cast = InputOutputCast()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns how to copy or pickle the module: by its original class, as the derived one cannot be imported."""
        make, args, *rest = super().__reduce_ex__(protocol)
        original = tuple(self._gradscale_original if arg is type(self) else arg for arg in args)
        return (_rebuilt, (self._gradscale_cast, make, original), *rest)


def _rebuilt(how: InputOutputCast, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    return set_input_output_cast(make(*args), how)


def set_input_output_cast(module: nn.Module, how: InputOutputCast) -> nn.Module:
    """Applies the cast to every call of `module`, and returns it. Changes its class to a subclass of the same name."""
    kind = type(module)
    module.__class__ = _cast_class(kind._gradscale_original if issubclass(kind, CastModule) else kind)
    module._gradscale_cast = how  # type: ignore[assignment]
    return module


def input_output_cast_of(module: nn.Module) -> InputOutputCast | None:
    """Returns the input/output cast of a module, or None if it has none."""
    return vars(module).get("_gradscale_cast")


@cache
def _cast_class(kind: type[nn.Module]) -> type[nn.Module]:
    run = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        how: InputOutputCast = self._gradscale_cast
        if how.inputs is not None:
            args, kwargs = cast(args, how.inputs, CASTABLE), cast(kwargs, how.inputs, CASTABLE)
        context: Any = nullcontext()
        if how.autocast is not None:
            on = how.autocast is not torch.float32
            context = torch.autocast(device_type(self), how.autocast if on else None, enabled=on)
        with context:
            outputs = run(self, *args, **kwargs)
        return outputs if how.outputs is None else cast(outputs, how.outputs, CASTABLE)

    # `torch.compile` counts recompilations by code object, and gives up after a few: every class gets its own.
    forward.__code__ = forward.__code__.replace()
    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    attributes |= {"forward": wraps(run)(forward), "_gradscale_original": kind}
    return type(kind.__name__, (CastModule, kind), attributes)


def device_type(module: nn.Module) -> str:
    """Returns the type of the device that a module is on."""
    # Not stored: the module may move between calls.
    return next((parameter.device.type for parameter in module.parameters()), "cpu")
