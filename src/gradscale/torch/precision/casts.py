"""The casts of `prepare`: of weights once, and of the inputs and outputs of modules at every call."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, wraps
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


def cast_models(models: Sequence[nn.Module], precision: Precision) -> None:
    """Casts the weights of models, and from now on their inputs and outputs. Parameters stay the same objects.

    Raises:
        ValueError: a pattern in `keep_fp32` matches no module, or a module that must stay float32 shares a weight with
            a model itself. Nothing has been changed then.
    """
    named, norms = _named(models, precision), set[nn.Module]()
    if precision.keep_norm_fp32 and precision.compute is not torch.float32:
        norms = {module for module in _all(models).difference(models) if isinstance(module, NORMS)}
    half = precision.compute if precision.half_weights else None
    if half is not None:
        named |= _tied(models, named | norms)
        for module in _all(models) - _all(named | norms):
            # One module at a time, and not `model.half()`: its submodules may stay float32.
            module._apply(lambda tensor: cast(tensor, half, [torch.float32]), recurse=False)
    # What is inside a module that stays float32 needs no cast of its own.
    inside = _all(child for module in named for child in module.children())
    for module in named - inside:
        set_input_output_cast(module, InputOutputCast(torch.float32, torch.float32, half))
    # Autocast runs these norm layers in float32 on some devices only; with a cast of their own they do on all.
    for norm in norms - named - inside:
        if not isinstance(norm, MIXED_NORMS):
            set_input_output_cast(norm, InputOutputCast(torch.float32, None, half))
    autocast = precision.compute if precision.autocast else None
    for model in models:
        set_input_output_cast(model, InputOutputCast(half, autocast, precision.output))


def _all(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns the modules and all their submodules."""
    return {each for module in modules for each in module.modules()}


def _named(models: Sequence[nn.Module], precision: Precision) -> set[nn.Module]:
    """Returns the modules that `keep_fp32` names; of a `ModuleList` or `ModuleDict`, those in it."""
    inside = [(name, each) for model in models for name, each in model.named_modules(remove_duplicate=False) if name]

    def matches(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
        return fnmatchcase(name, entry) if isinstance(entry, str) else isinstance(module, entry)

    found = {entry: [each for name, each in inside if matches(entry, name, each)] for entry in precision.keep_fp32}
    if unknown := [entry for entry, modules in found.items() if isinstance(entry, str) and not modules]:
        raise ValueError(
            "Every name pattern in `keep_fp32` must match a module, as `model.named_modules()` names them. "
            f"Received: {', '.join(map(repr, unknown))}, which match none."
        )
    return {called for modules in found.values() for module in modules for called in _called(module)}


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module, or the modules in it if it is never called itself, as a `ModuleList` is not."""
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from _called(child)


def _tied(models: Sequence[nn.Module], float32: set[nn.Module]) -> set[nn.Module]:
    """Returns the modules that share a weight with one of `float32`, and so must stay float32 themselves."""
    kept = _all(float32)
    weights = {weight for module in kept for weight in module.parameters(recurse=False)}
    tied = {each for each in _all(models) - kept if not weights.isdisjoint(each.parameters(recurse=False))}
    if whole := [model for model in models if model in tied]:
        raise ValueError(
            "A module that stays float32 shares a weight with the model itself, which would have to stay float32 "
            f"as a whole. Received: {type(whole[0]).__name__}. Put the shared weight into a module of its own, or "
            "leave the one that shares it out of `keep_fp32`."
        )
    # A module that stays float32 because of a shared weight may share another one with a third.
    return tied | _tied(models, kept | tied) if tied else tied


@dataclass(frozen=True, slots=True)
class InputOutputCast:
    """The casts around a call of a module.

    Attributes:
        inputs: dtype that inputs are cast to; None leaves them as they are.
        autocast: dtype of `torch.autocast` during the call; `torch.float32` disables it; None leaves it as it is.
        outputs: dtype that outputs are cast to; None leaves them as they are.
    """

    inputs: torch.dtype | None = None
    autocast: torch.dtype | None = None
    outputs: torch.dtype | None = None


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
