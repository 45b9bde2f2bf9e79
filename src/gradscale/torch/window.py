"""The stretch between two steps: one scale, any number of losses and backward passes, and the order they must keep."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer


class Window:
    """What happened since the last step: losses scaled, backward passes begun, gradients found lying about.

    The scale is fixed when the window opens, so that it divides exactly the gradients it made however many
    micro-batches the window holds.
    """

    def __init__(self, scale: Tensor, find_leftovers: Callable[[], set[int]]) -> None:
        self.scale = scale
        self.loss_finite = torch.ones((), dtype=torch.bool, device=scale.device)
        self.overflowed = torch.zeros((), dtype=torch.bool, device=scale.device)
        self.retries = 0
        self.backward_begun = False
        self.leftovers: set[int] = set()
        self._find_leftovers = find_leftovers

    def scaled(self, output: Tensor) -> Tensor:
        """Returns `output` times the scale, in float32 if it was narrower, and notes whether it was finite."""
        self.loss_finite = self.loss_finite & torch.isfinite(output.detach()).all().to(self.scale.device)
        wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        scaled = wide * self.scale.to(output.device, wide.dtype, non_blocking=True)
        if scaled.requires_grad:
            scaled.register_hook(self._on_backward)
        return scaled

    def note_overflow(self, overflowed: Tensor) -> None:
        """Notes that gradients taken outside of `step` overflowed, so that a loss made from them is not to blame."""
        self.overflowed = self.overflowed | overflowed.to(self.scale.device)

    def _on_backward(self, grad: Tensor) -> None:
        del grad
        if not self.backward_begun:
            self.backward_begun = True
            self.leftovers = self._find_leftovers()


class LeftoverWatch:
    """Remembers the gradients of each optimizer as the last window left them, to see if they are still there.

    One gradient stands for the optimizer: `zero_grad` clears all or none. It is compared by identity and version, so
    clearing it in place counts as clearing too, and nothing is read from the device.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._left: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def remember(self, optimizers: Iterable[Optimizer]) -> None:
        """Notes the gradients that `optimizers`, and all seen before, hold now."""
        self._known.update(optimizers)
        self._left = {}
        for optimizer in self._known:
            grad = _first_gradient(optimizer)
            if grad is not None:
                self._left[id(optimizer)] = (weakref.ref(grad), grad._version)

    def uncleared(self) -> set[int]:
        """Returns the ids of the optimizers whose gradients nobody has cleared since."""
        found: set[int] = set()
        for optimizer in self._known:
            reference, version = self._left.get(id(optimizer), (None, None))
            grad = _first_gradient(optimizer)
            if grad is not None and reference is not None and reference() is grad and grad._version == version:
                found.add(id(optimizer))
        return found


def _first_gradient(optimizer: Optimizer) -> Tensor | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return parameter.grad
    return None


def map_tensors(function: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    """Returns `outputs` with `function` applied to every tensor of a nested structure of dicts, lists and tuples."""
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, dict):
        return {key: map_tensors(function, value) for key, value in outputs.items()}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(map_tensors(function, value) for value in outputs))
    if isinstance(outputs, list | tuple):
        return type(outputs)(map_tensors(function, value) for value in outputs)
    raise TypeError(
        "`scale` takes a tensor, or lists, tuples and dicts of tensors. "
        f"Received: {type(outputs).__name__}. Pass the loss, not its `.item()`."
    )
