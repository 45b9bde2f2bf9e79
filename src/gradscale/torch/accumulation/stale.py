"""Stale gradients: those of an earlier step that were not cleared since."""

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from gradscale.torch.accumulation.leaves import leaves_of
from gradscale.torch.accumulation.unscaled import all_zero
from gradscale.torch.step.gradients import parameters_of

Optimizer = torch.optim.Optimizer


class StaleGradients:
    """Remembers the gradients that exist when a step ends, to find those that were not cleared before the next one.

    Not only those of the step: a generator's backward pass fills the gradients of the discriminator. A gradient is
    recognized by identity and version, and nothing is read from the device: `zero_grad(set_to_none=False)` counts as
    clearing, as does any other write in place.
    """

    # References are weak. A strong one to a gradient would keep its memory after `zero_grad`; one to an optimizer, the
    # parameters of a model that was replaced.
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # FSDP2 keeps gradients in shards, which take the place of the modules' parameters outside of forward and
        # backward passes only.
        self._at_start = self._of_modules()
        self._modules_suffice = False
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._others: list[weakref.ref[Tensor]] | None = None
        # Two lists, not one of tuples: thousands of containers at every step would keep the garbage collector busy.
        self._grads: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []

    def __reduce__(self) -> tuple[type["StaleGradients"], tuple[Sequence[nn.Module]]]:
        """A copy starts empty."""
        return StaleGradients, (self._modules,)

    def note_graph(self, loss: Tensor) -> None:
        """Notes which parameters the backward pass of `loss` reaches, whether their optimizer is known or not.

        Walks through the graph, unless a loss has shown that the modules hold all its parameters.
        """
        if self._modules_suffice:
            return
        leaves = leaves_of(loss)
        owned = {id(parameter) for module in self._modules for parameter in module.parameters()}
        if owned and all(id(leaf) in owned for leaf in leaves if isinstance(leaf, nn.Parameter)):
            self._modules_suffice = True
            return
        alive = {key: leaf for key, leaf in self._leaves.items() if leaf() is not None}
        self._leaves = alive | {id(leaf): weakref.ref(leaf) for leaf in leaves}
        if len(self._leaves) > len(alive):
            self._others = None

    def remember(self, optimizers: Sequence[Optimizer], *, zeros: bool = True) -> None:
        """Notes the gradients held now by `optimizers` and by all parameters noted before.

        Without `zeros` only those that are not all zeros, which synchronizes with the device.
        """
        # `.grad` is looked up again: an optimizer, or a hook of its step, may have replaced the gradients of the step.
        if [optimizer for optimizer in optimizers if optimizer not in self._known]:
            self._known.update(optimizers)
            self._others = None
        held = [grad for parameter in self.watched() if (grad := parameter.grad) is not None]
        if not zeros:
            held = [each.grad for each in self.watched() if each.grad is not None and not all_zero([each])]
        self._grads = [weakref.ref(grad) for grad in held]
        self._versions = [grad._version for grad in held]

    def uncleared(self) -> list[Tensor]:
        """Returns the parameters whose gradients were neither cleared nor replaced since."""
        present = [parameter for parameter in self.watched() if parameter.grad is not None]
        if not present:
            return []
        noted = zip(self._grads, self._versions, strict=True)
        left = {id(grad): version for reference, version in noted if (grad := reference()) is not None}
        return [each for each in present if (grad := each.grad) is not None and left.get(id(grad)) == grad._version]

    def watched(self) -> Iterator[Tensor]:
        """Yields the parameters of the known optimizers, then those that only modules and graphs of losses hold."""
        if self._others is None:
            self._others = self._held_by_no_optimizer()
        yield from parameters_of(self._known)
        for reference in self._others:
            if (parameter := reference()) is not None:
                yield parameter

    def _held_by_no_optimizer(self) -> list[weakref.ref[Tensor]]:
        """Returns the parameters of modules and graphs that no known optimizer holds. Slow: not for every step."""
        held = {id(parameter) for parameter in parameters_of(self._known)}
        at_start = {key: reference for key, reference in self._at_start.items() if reference() is not None}
        found = at_start | self._of_modules() | self._leaves
        return [reference for key, reference in found.items() if key not in held]

    def _of_modules(self) -> dict[int, weakref.ref[Tensor]]:
        """Returns the parameters that the modules have now, by id."""
        parameters: Iterator[Tensor] = chain.from_iterable(module.parameters() for module in self._modules)
        return {id(parameter): weakref.ref(parameter) for parameter in parameters}
