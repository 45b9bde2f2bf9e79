"""The weight cast: which modules become half, and which stay float32."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from gradscale.torch.precision.input_output_cast import InputOutputCast, set_input_output_cast
from gradscale.torch.precision.levels import Precision

MIXED_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Norm layers whose kernels take half activations with float32 weights, on every device, and compute in float32."""

NORMS = (*MIXED_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

ModuleCasts = list[tuple[nn.Module, InputOutputCast]]


@dataclass(frozen=True, slots=True)
class WeightCast:
    """The changes to models that are prepared together.

    Attributes:
        half: modules whose own weights and buffers become half.
        casts: modules that get an input/output cast, with it: those that stay float32 first, then the models.
    """

    half: Sequence[nn.Module]
    casts: ModuleCasts

    def apply(self, dtype: torch.dtype) -> None:
        """Casts the half modules to `dtype`, and sets the input/output casts. Parameters stay the same objects."""
        for module in self.half:
            # One module at a time, and not `model.half()`: its submodules may stay float32.
            module._apply(_to(dtype), recurse=False)
        for module, how in self.casts:
            set_input_output_cast(module, how)


def plan_weight_cast(models: Sequence[nn.Module], precision: Precision) -> WeightCast:
    """Returns the changes for `precision`. Changes nothing itself.

    Raises:
        ValueError: a module that must stay float32 shares a weight with a model itself.
    """
    named = _named(models, precision)
    norms = _norms(models) if precision.keep_norm_fp32 and precision.compute is not torch.float32 else []
    if not precision.half_weights:
        return WeightCast([], _float32_casts(named, norms, None) + _model_casts(models, precision))
    named += _tied(models, _ids([*named, *norms]))
    float32 = _ids([*named, *norms])
    half = [module for model in models for module in model.modules() if id(module) not in float32]
    return WeightCast(half, _float32_casts(named, norms, precision.compute) + _model_casts(models, precision))


def unmatched(models: Sequence[nn.Module], precision: Precision) -> list[str]:
    """Returns the name patterns of `keep_fp32` that match no module of `models`."""
    names = [name for name, _ in _submodules(models)]
    patterns = [entry for entry in precision.keep_fp32 if isinstance(entry, str)]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def _model_casts(models: Sequence[nn.Module], precision: Precision) -> ModuleCasts:
    how = InputOutputCast(
        inputs=precision.compute if precision.half_weights else None,
        autocast=precision.compute if precision.autocast else None,
        outputs=precision.output,
        precision=precision,
    )
    return [(model, how) for model in models]


def _float32_casts(named: Sequence[nn.Module], norms: Sequence[nn.Module], outputs: torch.dtype | None) -> ModuleCasts:
    """Returns the casts of modules that stay float32: inputs to float32, and outputs to `outputs`.

    A submodule of another such module needs none, and neither do norm layers whose kernels take both dtypes. Autocast
    runs the other norm layers in float32 on some devices only; with a cast of their own they do on all.
    """
    nested, covered = _ids(child for module in named for child in module.children()), _ids(named)
    outermost = [module for module in named if id(module) not in nested]
    casting = [norm for norm in norms if not isinstance(norm, MIXED_NORMS) and id(norm) not in covered]
    return [
        *((module, InputOutputCast(torch.float32, torch.float32, outputs)) for module in outermost),
        *((module, InputOutputCast(torch.float32, None, outputs)) for module in casting),
    ]


def _submodules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every submodule of `models`, once for each name it has."""
    for model in models:
        named = model.named_modules(remove_duplicate=False)
        yield from ((name, module) for name, module in named if module is not model)


def _named(models: Sequence[nn.Module], precision: Precision) -> list[nn.Module]:
    """Returns the modules that `keep_fp32` names; of a `ModuleList` or `ModuleDict`, those in it."""

    def matches(name: str, module: nn.Module) -> bool:
        return any(
            fnmatchcase(name, entry) if isinstance(entry, str) else isinstance(module, entry)
            for entry in precision.keep_fp32
        )

    found = [module for name, module in _submodules(models) if matches(name, module)]
    return list({id(called): called for module in found for called in _called(module)}.values())


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module, or the modules in it if it is never called itself, as a `ModuleList` is not."""
    if type(module).forward is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from _called(child)


def _norms(models: Sequence[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for _, module in _submodules(models) if isinstance(module, NORMS)}.values())


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    """Returns the ids of the modules and of all their submodules."""
    return {id(each) for module in modules for each in module.modules()}


def _tied(models: Sequence[nn.Module], kept: set[int]) -> list[nn.Module]:
    """Returns the modules that share a weight with one that stays float32, and so must stay float32 themselves."""
    modules = [module for model in models for module in model.modules()]
    float32 = {id(own) for module in modules if id(module) in kept for own in module.parameters(recurse=False)}

    def shares(module: nn.Module) -> bool:
        return any(id(own) in float32 for own in module.parameters(recurse=False))

    found = [module for module in modules if id(module) not in kept and shares(module)]
    for model in models:
        if model in found:
            raise ValueError(
                "A module that stays float32 shares a weight with the model itself, which would have to stay float32 "
                f"as a whole. Received: {type(model).__name__}. Put the shared weight into a module of its own, or "
                "leave the one that shares it out of `keep_fp32`."
            )
    # A module that stays float32 because of a shared weight may share another one with a third.
    return found + _tied(models, kept | _ids(found)) if found else []


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor
