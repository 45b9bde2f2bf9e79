"""Models and optimizers as they were, for a `prepare` that fails half-way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer


@contextmanager
def undone_on_error(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Undoes the changes of a weight cast and of optimizers if the block raises. Copies no tensor.

    Casts replace the data of parameters, and optimizers the entries of their groups and their state, so that references
    to the old ones are enough. They are kept until the end of the block.
    """
    modules = [_Module(module) for model in models for module in model.modules()]
    states = [_State(optimizer) for optimizer in optimizers]
    try:
        yield
    except BaseException:
        for each in (*modules, *states):
            each.restore()
        raise


class _Module:
    """A module's class, parameters, gradients and buffers, without those of its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._class = module, type(module)
        self._attributes = dict(vars(module))
        self._buffers = dict(module._buffers)
        parameters = [each for each in module._parameters.values() if each is not None]
        tensors: list[Tensor] = [*parameters, *(each.grad for each in parameters if each.grad is not None)]
        # Detached: a cast sets `data`, and these keep referring to the old data.
        self._data = [(tensor, tensor.detach()) for tensor in tensors]

    def restore(self) -> None:
        self._module.__class__ = self._class
        for name in vars(self._module).keys() - self._attributes.keys():
            del vars(self._module)[name]
        self._module._buffers.update(self._buffers)
        for tensor, data in self._data:
            tensor.data = data


class _State:
    """An optimizer's groups and state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, dict(group)) for group in optimizer.param_groups
        ]
        self._state, self._entries = optimizer.state, dict(optimizer.state)

    def restore(self) -> None:
        for group, entries in self._groups:
            group.clear()
            group.update(entries)
        self._optimizer.param_groups = [group for group, _ in self._groups]
        self._state.clear()
        self._state.update(self._entries)
        self._optimizer.state = self._state
