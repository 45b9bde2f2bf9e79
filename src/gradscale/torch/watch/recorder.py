"""Hooks that count every tensor of a model by its powers of two, forward and backward, while they are attached."""

import re
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradscale.kernels.torch_exponents import tally
from gradscale.torch.cast import tensors_in
from gradscale.torch.gradients import numbers_of
from gradscale.torch.probing.run import probing
from gradscale.torch.wrappers import own_module, own_name
from gradscale.watching.rows import KINDS, MODEL, Key, Kind, Sample, Tally, sample_of


class LeftOut(partial[None]):
    """A hook that a copy or a pickle of the model does not take along: there it does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)


def _nothing(*args: Any) -> None: ...


class Recorder:
    """Records a model's tensors until `detach`, by hooks on every chosen module and parameter.

    Args:
        model: whose modules are recorded, without wrappers around it.
        layers: a regular expression; modules in whose name it is found are recorded, with their own parameters.
        scale_of: returns the scale of the loss.
        kinds: what is recorded.
    """

    def __init__(
        self, model: nn.Module, layers: str, scale_of: Callable[[], float], kinds: Collection[Kind] = KINDS
    ) -> None:
        self._scale_of = scale_of
        self._kinds = kinds
        self._handles: list[RemovableHandle] = []
        self._found: dict[Key, list[Tally]] = {}
        self._without_gradients: set[str] = set()
        # By the identity of a tensor: a weak reference to it, its version, and what was counted.
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tally]] = {}
        root = own_module(model)
        for wrapped_name, module in root.named_modules():
            if not re.search(layers, name := own_name(wrapped_name)):
                continue
            self._handles.append(module.register_forward_hook(LeftOut(self._forward, name), with_kwargs=True))
            for key, parameter in _parameters(name, module, "weight_grad"):
                if parameter.requires_grad and "weight_grad" in self._kinds:
                    record = partial(self._weight_grad, key)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(record))

    def detach(self) -> Sample:
        """Removes every hook, and returns what was recorded."""
        for handle in self._handles:
            handle.remove()
        return sample_of((key, each) for key, found in self._found.items() for each in found)

    def _forward(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if probing.get():
            return
        if not torch.is_grad_enabled():
            # Validation, or the first pass of a checkpointed module, which is run again with gradients.
            self._without_gradients.add(name)
            return
        # Inside of a backward pass it is run again. Checkpoints that are not reentrant had gradients the first time.
        again = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateImportUsage]
        if again and name not in self._without_gradients:
            return
        shown = name or MODEL
        for key, parameter in _parameters(name, module, "weight"):
            if key not in self._found:
                self._add(key, parameter)
        self._add((shown, "input"), (args, kwargs))
        self._add((shown, "output"), output)
        for tensor in _floating(output):
            if tensor.requires_grad and "output_grad" in self._kinds:
                record = partial(self._output_grad, (shown, "output_grad"), [])
                self._handles.append(tensor.register_hook(record))

    def _output_grad(self, key: Key, last: list[Tally], grad: Tensor) -> None:
        """Adds the gradient of an output; `last` is what was counted of it in its last backward pass."""
        scale, found = self._scale_of(), self._found.setdefault(key, [])
        # A pass that has overflowed is run again at a lower scale, and its gradients are not used.
        if last and last[0].scale != scale:
            found.remove(last[0])
        self._add(key, grad, scale)
        last[:] = found[-1:]

    def _weight_grad(self, key: Key, parameter: Tensor) -> None:
        if parameter.grad is not None:
            # Replaced, not added: `.grad` is the sum of all backward passes of the step so far.
            self._found[key] = [tally(numbers_of(parameter.grad.detach()), self._scale_of())]

    def _add(self, key: Key, values: Any, scale: float = 1.0) -> None:
        """Adds the tensors in `values`. One that is the output of a module and the input of others is counted once."""
        for tensor in _floating(values) if key[1] in self._kinds else ():
            known = self._known.get(id(tensor))
            if known is None or known[0]() is not tensor or (known[1], known[2].scale) != (tensor._version, scale):
                known = weakref.ref(tensor), tensor._version, tally(numbers_of(tensor.detach()), scale)
                self._known[id(tensor)] = known
            self._found.setdefault(key, []).append(known[2])


def _floating(values: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(values) if tensor.is_floating_point() or tensor.is_complex())


def _parameters(name: str, module: nn.Module, kind: Kind) -> Iterator[tuple[Key, Tensor]]:
    """Yields the own parameters of a module, each with its key."""
    for own, parameter in module._parameters.items():
        if parameter is not None:
            yield (f"{name}.{own}" if name else own, kind), parameter
