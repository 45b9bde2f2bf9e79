"""Hooks that count every tensor of a model by its powers of two, forward and backward, while they are attached."""

import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradscale.kernels.torch_pieces import Pieces
from gradscale.torch.cast import tensors_in
from gradscale.torch.probing.restore import probing
from gradscale.torch.watch.counter import Counter
from gradscale.torch.wrappers import own_module, own_name
from gradscale.watching.sample import MODEL, Key, Kind, Sample


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
        self._kinds = frozenset(kinds)
        self._forward_kinds = self._kinds - {"weight_grad"}
        self._handles: list[RemovableHandle] = []
        self._own_names: dict[str, str] = {}
        self._pieces = Pieces()
        self._begin()

    def attach(self) -> None:
        """Registers hooks on every chosen module and parameter."""
        self._begin()
        for name, module in self._chosen():
            if self._forward_kinds:
                self._handles.append(
                    module.register_forward_hook(LeftOut(partial(self._forward, name)), with_kwargs=True)
                )
            for parameter_name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and "weight_grad" in self._kinds:
                    record = partial(self._weight_grad, (_joined(name, parameter_name), "weight_grad"))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(record))

    def detach(self) -> Sample:
        """Removes every hook, and returns what was recorded since `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        sample = Sample(self._slots, self._counter.counted())
        self._begin()
        return sample

    def _begin(self) -> None:
        """Forgets what was recorded."""
        self._counter = Counter(self._pieces)
        self._slots: dict[Key, list[int]] = {}
        self._without_gradients: set[str] = set()
        # By the identity of a tensor: a weak reference to it, its version, the scale, and where it was counted.
        self._known: dict[int, tuple[weakref.ref[Tensor], int, float, int]] = {}

    def _chosen(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            own = self._own_names.get(name)
            if own is None:
                own = self._own_names[name] = own_name(name, self._model)
            if self._layers.search(own):
                yield own, module

    def _forward(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if probing.get() or not self._is_first_pass(name):
            return
        shown = name or MODEL
        if "weight" in self._kinds:
            for parameter_name, parameter in module._parameters.items():
                key: Key = (_joined(name, parameter_name), "weight")
                if parameter is not None and key not in self._slots:
                    self._add(key, parameter)
        if "input" in self._kinds:
            for value in (*args, *kwargs.values()):
                self._add((shown, "input"), value)
        if "output" in self._kinds:
            self._add((shown, "output"), output)
        if "output_grad" in self._kinds:
            for tensor in _floating(output):
                if tensor.requires_grad:
                    record = partial(self._output_grad, (shown, "output_grad"), [])
                    self._handles.append(tensor.register_hook(record))

    def _is_first_pass(self, name: str) -> bool:
        """Returns whether a forward pass is of training, and not one of numbers that are recorded already."""
        if not torch.is_grad_enabled():
            # Validation, or the first pass of a checkpointed module, which is run again with gradients.
            self._without_gradients.add(name)
            return False
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateImportUsage]
            return True
        # Inside of a backward pass it is run again. Checkpoints that are not reentrant had gradients the first time.
        return name in self._without_gradients

    def _output_grad(self, key: Key, last: list[tuple[int, float]], grad: Tensor) -> None:
        """Adds the gradient of an output; `last` is where that of its last backward pass was counted, and its scale."""
        scale, slots = self._scale_of(), self._slots.setdefault(key, [])
        # A pass that has overflowed is run again at a lower scale, and its gradients are not used.
        if last and last[0][1] != scale:
            slots.remove(last[0][0])
        self._add(key, grad, scale)
        last[:] = [(slots[-1], scale)]

    def _weight_grad(self, key: Key, parameter: Tensor) -> None:
        if parameter.grad is not None:
            # Replaced, not added: `.grad` is the sum of all backward passes of the step so far.
            self._slots[key] = [self._counter.add(parameter.grad, self._scale_of())]

    def _add(self, key: Key, values: Any, scale: float = 1.0) -> None:
        """Adds the tensors in `values`. One that is the output of a module and the input of others is counted once."""
        for tensor in _floating(values):
            known = self._known.get(id(tensor))
            if known is None or known[0]() is not tensor or known[1:3] != (tensor._version, scale):
                known = weakref.ref(tensor), tensor._version, scale, self._counter.add(tensor, scale)
                self._known[id(tensor)] = known
            self._slots.setdefault(key, []).append(known[3])


def _floating(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):  # most outputs and all gradients
        return (values,) if values.is_floating_point() or values.is_complex() else ()
    return (tensor for tensor in tensors_in(values) if tensor.is_floating_point() or tensor.is_complex())


def _joined(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter
