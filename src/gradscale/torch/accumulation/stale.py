"""Stale gradients: those of an earlier step that were not cleared since."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradscale.torch.step.gradients import parameters_of

Optimizer = torch.optim.Optimizer


class StaleGradients:
    """Remembers the gradients that exist when a step ends, to find those that were not cleared before the next one.

    Not only those of the step: a generator's backward pass fills the gradients of the discriminator. A gradient is
    recognised by identity and version, and nothing is read from the device: `zero_grad(set_to_none=False)` counts as
    clearing, as does any other write in place.
    """

    # References are weak. A strong one to a gradient would keep its memory after `zero_grad`; one to an optimizer, the
    # parameters of a model that was replaced.
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: list[weakref.ref[Tensor]] | None = None
        # Two lists, not one of tuples: thousands of containers at every step would keep the garbage collector busy.
        self._grads: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []

    def __reduce__(self) -> tuple[type["StaleGradients"], tuple[Sequence[nn.Module]]]:
        """A copy starts empty."""
        return StaleGradients, (self._modules,)

    def remember(self, optimizers: Sequence[Optimizer]) -> None:
        """Notes the gradients held now by `optimizers`, by those noted before, and by the modules."""
        # `.grad` is looked up again: an optimizer, or a hook of its step, may have replaced the gradients of the step.
        if self._others is None or [optimizer for optimizer in optimizers if optimizer not in self._known]:
            self._known.update(optimizers)
            self._others = self._held_by_modules_alone()
        held = [grad for grad in [parameter.grad for parameter in self._watched()] if grad is not None]
        self._grads = [weakref.ref(grad) for grad in held]
        self._versions = [grad._version for grad in held]

    def uncleared(self) -> list[Tensor]:
        """Returns the parameters whose gradients were neither cleared nor replaced since."""
        present = [parameter for parameter in self._watched() if parameter.grad is not None]
        if not present:
            return []
        noted = zip(self._grads, self._versions, strict=True)
        left = {id(grad): version for reference, version in noted if (grad := reference()) is not None}
        return [each for each in present if (grad := each.grad) is not None and left.get(id(grad)) == grad._version]

    def _watched(self) -> list[Tensor]:
        """Returns the parameters of the known optimizers, then those that only the modules hold."""
        others = [parameter for reference in self._others or () if (parameter := reference()) is not None]
        return [*parameters_of(self._known), *others]

    def _held_by_modules_alone(self) -> list[weakref.ref[Tensor]]:
        """Returns the modules' parameters that no known optimizer holds. Slow: not for every step."""
        held = {id(parameter) for parameter in parameters_of(self._known)}
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        return [weakref.ref(parameter) for parameter in parameters if id(parameter) not in held]
