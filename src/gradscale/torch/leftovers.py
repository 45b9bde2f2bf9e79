"""Gradients that an earlier step left behind, told apart from those that somebody has cleared since."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from gradscale.torch.gradients import placed_parameters

Optimizer = torch.optim.Optimizer


class Leftovers:
    """Remembers the gradients that a step left in its optimizers, to see later if they are still there.

    Optimizers of earlier steps count too: a generator's backward pass fills the gradients of the discriminator. A
    gradient is known by its identity and version, so clearing it in place counts as clearing, and nothing is read from
    the device. References are weak.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._left: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]] = []

    def __reduce__(self) -> tuple[type["Leftovers"], tuple[()]]:
        """A copy starts afresh: it has seen no gradients."""
        return Leftovers, ()

    def remember(self, optimizers: Iterable[Optimizer]) -> None:
        """Notes the gradients that `optimizers`, and all noted before, hold now."""
        self._known.update(optimizers)
        self._left = [
            (weakref.ref(parameter), weakref.ref(grad), grad._version)
            for parameter, _ in placed_parameters(self._known)
            if (grad := parameter.grad) is not None
        ]

    def uncleared(self) -> list[Tensor]:
        """Returns the parameters whose gradients nobody has cleared or replaced since."""
        found: list[Tensor] = []
        for parameter_reference, grad_reference, version in self._left:
            grad, parameter = grad_reference(), parameter_reference()
            if grad is None or parameter is None:
                continue
            if parameter.grad is grad and grad._version == version:
                found.append(parameter)
        return found
