"""Which modules become half and which stay float32, and the change itself."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from gradscale.torch.precision.input_output_cast import Border, set_border
from gradscale.torch.precision.levels import Precision

MIXED_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Norm layers whose kernels take half activations beside float32 weights, on every device, and compute in float32."""

NORMS = (*MIXED_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done to some models that are prepared together.

    Attributes:
        halved: modules whose own weights and buffers become half.
        borders: modules that get a border, with it: islands of float32 first, then the models themselves.
    """

    halved: Sequence[nn.Module]
    borders: Sequence[tuple[nn.Module, Border]]

    def carry_out(self, dtype: torch.dtype) -> None:
        """Casts what becomes half to `dtype`, and sets the borders. Parameters stay the objects they are."""
        for module in self.halved:
            module._apply(_to(dtype), recurse=False)
        for module, border in self.borders:
            set_border(module, border)


def plan(models: Sequence[nn.Module], precision: Precision) -> Plan:
    """Returns what `precision` asks to be done to `models`. Changes nothing.

    Raises:
        ValueError: a module that must stay float32 shares a weight with a model itself.
    """
    named = _named(models, precision)
    norms = _norms(models) if precision.keep_norm_fp32 and precision.compute is not torch.float32 else []
    if not precision.half_weights:
        return Plan([], _islands(named, norms, None) + _own_borders(models, precision))
    named += _tied(models, _inside([*named, *norms]))
    kept = _inside([*named, *norms])
    halved = [part for model in models for part in model.modules() if id(part) not in kept]
    return Plan(halved, _islands(named, norms, precision.compute) + _own_borders(models, precision))


def unmatched(models: Sequence[nn.Module], precision: Precision) -> list[str]:
    """Returns the name patterns of `keep_fp32` that no module of `models` answers to."""
    names = [name for name, _ in _parts(models)]
    patterns = [entry for entry in precision.keep_fp32 if isinstance(entry, str)]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def _own_borders(models: Sequence[nn.Module], precision: Precision) -> list[tuple[nn.Module, Border]]:
    border = Border(
        inputs=precision.compute if precision.half_weights else None,
        autocast=precision.compute if precision.autocast else None,
        outputs=precision.output,
        precision=precision,
    )
    return [(model, border) for model in models]


def _islands(
    named: Sequence[nn.Module], norms: Sequence[nn.Module], back: torch.dtype | None
) -> list[tuple[nn.Module, Border]]:
    """Returns the borders of modules that stay float32: activations are cast to float32 there, and then to `back`.

    A module inside another island needs none, and neither do norm layers whose kernels do the same. Autocast runs the
    other norm layers in float32 on some devices only; with a border they do on all.
    """
    inner, inside = _inside(child for module in named for child in module.children()), _inside(named)
    casting = [norm for norm in norms if not isinstance(norm, MIXED_NORMS) and id(norm) not in inside]
    return [
        *((module, Border(torch.float32, torch.float32, back)) for module in named if id(module) not in inner),
        *((module, Border(torch.float32, None, back)) for module in casting),
    ]


def _parts(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module inside `models`, once for each name it has."""
    for model in models:
        yield from ((name, part) for name, part in model.named_modules(remove_duplicate=False) if part is not model)


def _named(models: Sequence[nn.Module], precision: Precision) -> list[nn.Module]:
    """Returns the modules that `keep_fp32` names; instead of a mere list of modules, those in it."""

    def matches(name: str, part: nn.Module) -> bool:
        return any(
            fnmatchcase(name, entry) if isinstance(entry, str) else isinstance(part, entry)
            for entry in precision.keep_fp32
        )

    found = [part for name, part in _parts(models) if matches(name, part)]
    return list({id(part): part for module in found for part in _called(module)}.values())


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module, or the modules inside it if it is never called itself, as a `ModuleList` is not."""
    if type(module).forward is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from _called(child)


def _norms(models: Sequence[nn.Module]) -> list[nn.Module]:
    return list({id(part): part for _, part in _parts(models) if isinstance(part, NORMS)}.values())


def _inside(modules: Iterable[nn.Module]) -> set[int]:
    return {id(part) for module in modules for part in module.modules()}


def _tied(models: Sequence[nn.Module], kept: set[int]) -> list[nn.Module]:
    """Returns the modules that share a weight with one that stays float32, and so must stay float32 themselves."""
    parts = [part for model in models for part in model.modules()]
    float32 = {id(own) for part in parts if id(part) in kept for own in part.parameters(recurse=False)}

    def shares(part: nn.Module) -> bool:
        return any(id(own) in float32 for own in part.parameters(recurse=False))

    found = [part for part in parts if id(part) not in kept and shares(part)]
    for model in models:
        if model in found:
            raise ValueError(
                "A module that stays float32 shares a weight with the model itself, which would have to stay float32 "
                f"as a whole. Received: {type(model).__name__}. Put the shared weight into a module of its own, or "
                "leave the one that shares it out of `keep_fp32`."
            )
    # What stays float32 because of a shared weight may share another one.
    return found + _tied(models, kept | _inside(found)) if found else []


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor
