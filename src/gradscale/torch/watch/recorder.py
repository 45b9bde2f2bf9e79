"""Hooks that count every tensor of a model by its powers of two, forward and backward, while they are attached."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradscale.torch.cast import tensors_in
from gradscale.torch.watch.tally import Key, Kind, Tally, tally_of
from gradscale.torch.wrappers import own_module, own_name

MODEL = "(model)"
"""The name of the whole model, which torch calls by the empty string."""


class LeftOut:
    """A hook that a copy or a pickle of the model does not take along: there it does nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _ignore


def _ignore(*args: Any) -> None:
    del args


class Recorder:
    """Records a model's tensors between `attach` and `detach`.

    Args:
        model: whose modules are recorded, without wrappers around it.
        layers: a regular expression; modules in whose name it is found are recorded, with their own parameters.
        scale_of: returns the scale of the loss.
        kinds: what is recorded.
    """

    def __init__(self, model: nn.Module, layers: str, scale_of: Callable[[], float], kinds: tuple[Kind, ...]) -> None:
        self._model = own_module(model)
        self._layers = re.compile(layers)
        self._scale_of = scale_of
        self._kinds = kinds
        self._handles: list[RemovableHandle] = []
        self._tallies: dict[Key, Tally] = {}
        self._counted: Any = None

    def attach(self) -> None:
        """Registers hooks on every chosen module and parameter."""
        # Imported here: it loads a large part of torch.
        from torch.utils.weak import WeakIdKeyDictionary

        self._counted = WeakIdKeyDictionary()
        self._tallies = {}
        for name, module in self._chosen():
            if {"weight", "input", "output", "output_grad"} & set(self._kinds):
                self._handles.append(
                    module.register_forward_hook(LeftOut(partial(self._forward, name)), with_kwargs=True)
                )
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and "weight_grad" in self._kinds:
                    record = partial(self._weight_grad, _joined(name, parameter_name))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(record))

    def detach(self) -> dict[Key, Tally]:
        """Removes every hook, and returns what was recorded since `attach`, by the name and the kind of the tensor."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._counted = [], None
        return self._tallies

    def _chosen(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            own = own_name(name, self._model)
            if self._layers.search(own):
                yield own, module

    def _forward(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # Without gradients it is no training: validation, or the first pass of a checkpointed module.
        if not torch.is_grad_enabled():
            return
        shown = name or MODEL
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if (key := (_joined(name, parameter_name), "weight")) not in self._tallies:
                self._add(key, parameter)
        self._add((shown, "input"), (args, kwargs))
        self._add((shown, "output"), output)
        if "output_grad" in self._kinds:
            for tensor in _floating(output):
                if tensor.requires_grad:
                    self._handles.append(tensor.register_hook(partial(self._output_grad, shown)))

    def _output_grad(self, name: str, grad: Tensor) -> None:
        self._add((name, "output_grad"), grad, self._scale_of())

    def _weight_grad(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            # Replaced, not added: `.grad` is the sum of all backward passes of the step so far.
            self._tallies[name, "weight_grad"] = tally_of(parameter.grad, self._scale_of())

    def _add(self, key: Key, values: Any, scale: float = 1.0) -> None:
        """Adds the tensors in `values`. One that is the output of a module and the input of others is counted once."""
        if key[1] not in self._kinds:
            return
        for tensor in _floating(values):
            known = self._counted.get(tensor)
            if known is None or known[0] != tensor._version or known[1].scale != scale:
                known = self._counted[tensor] = tensor._version, tally_of(tensor, scale)
            tally = self._tallies.get(key)
            self._tallies[key] = known[1] if tally is None else tally + known[1]


def _floating(values: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(values) if tensor.is_floating_point() or tensor.is_complex())


def _joined(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter
