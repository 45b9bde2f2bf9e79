"""The accumulation window: one scale, and any number of losses and backward passes, between two steps."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_map

from gradscale.torch.accumulation.stale import StaleGradients
from gradscale.torch.checks import check_order, refuse_some_unscaled, refuse_stale, refuse_unknown_parameters
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Names, parameters_of

Optimizer = torch.optim.Optimizer


class Window:
    """What happened since the last step: losses scaled, backward passes begun, stale gradients found.

    Attributes:
        scale: the scale of all losses of this window, of every micro-batch. Only a retry changes it.
        loss_finite: whether every loss was finite so far, a 0-d bool.
        overflowed: whether gradients overflowed outside of `step`, although the losses until then were finite.
        backward_begun: whether a backward pass has begun.
        stale: parameters that held gradients of an earlier window when the first backward pass of this one began.
        retries: how often a backward pass was run again.
        rescaled: ids of the parameters whose gradients a retry has multiplied to its scale; None without one.
        unscaled_by: ids of the optimizers whose gradients are unscaled already.
        unscaled_amax: largest of those gradients, unscaled, before the user's edits.
        unscaled_share: share of their elements above the policy's edge, before the user's edits.
    """

    def __init__(self, scale: Tensor, find_stale: Callable[[], list[Tensor]], current: Callable[[], "Window"]) -> None:
        """Opens a window.

        Args:
            scale: the scale of its losses.
            find_stale: finds stale gradients; called once, when the first backward pass begins.
            current: returns the window that is open then: another one, for a loss whose backward pass comes late.
        """
        # A step inside `torch.inference_mode()` makes a scale that autograd cannot keep for the backward pass.
        self.scale = scale.clone() if scale.is_inference() else scale
        self.loss_finite = torch.ones((), dtype=torch.bool, device=scale.device)
        self.overflowed = ~self.loss_finite
        self.backward_begun = False
        self.stale: list[Tensor] = []
        self.retries = 0
        self.rescaled: set[int] | None = None
        self.unscaled_by: set[int] = set()
        self.unscaled_amax = torch.zeros_like(scale)
        self.unscaled_share = torch.zeros_like(scale)
        self._unscaled_elements = 0
        self._unscaled: list[Tensor] = []
        self._find_stale = find_stale
        self._current = current

    def scaled(self, output: Tensor) -> Tensor:
        """Returns `output` times the scale, with a hook on its backward pass."""
        finite = self.note_loss(output)
        scaled = self.product(output)
        if scaled.requires_grad:
            # Stale gradients are searched for when the backward pass begins: at `scale` it is too early, since
            # `zero_grad` may still follow, and at `step` it is too late, since autograd has added to them in place.
            scaled.register_hook(partial(self._on_backward, self.scale, finite))
        return scaled

    def product(self, output: Tensor) -> Tensor:
        """Returns `output` times the scale, in float32 if it was narrower: FP16 cannot hold `1.0 * 65536`."""
        wide = output.float() if output.dtype.itemsize < 4 else output
        return wide * self.scale.to(output.device, wide.dtype, non_blocking=True)

    def unscale(self, grad: Tensor) -> Tensor:
        """Returns a gradient divided by the scale, in float32 if it was narrower; differentiable."""
        wide = grad.float() if grad.dtype.itemsize < 4 else grad
        return wide * (1.0 / self.scale).to(grad.device, wide.dtype, non_blocking=True)

    def note_loss(self, output: Tensor) -> Tensor:
        """Returns whether `output` is finite, a 0-d bool on the scaler's device, and remembers it for the window."""
        # Times 0: NaN if the loss is inf or NaN, else 0. `isfinite` takes twice as many kernels.
        finite = (output.detach() * 0 == 0).all().to(self.scale.device)
        self.loss_finite = self.loss_finite & finite
        return finite

    def note_overflow(self, overflowed: Tensor) -> None:
        """Notes that gradients taken outside of `step` overflowed, so that a loss made from them is not the cause.

        A loss that was not finite before them takes precedence.
        """
        self.overflowed = self.overflowed | (overflowed.to(self.scale.device) & self.loss_finite)

    def note_unscaled(
        self, optimizers: Sequence[torch.optim.Optimizer], amax: Tensor, upper_share: Tensor, elements: int
    ) -> None:
        """Notes that the gradients of `optimizers` are unscaled from now on, and how large they are.

        `amax` is the largest of them, and `upper_share` the share of their `elements` above the policy's edge.
        """
        self.unscaled_by.update(id(optimizer) for optimizer in optimizers)
        self._unscaled += parameters_of(optimizers)
        self.unscaled_amax = torch.maximum(self.unscaled_amax, amax)
        above = self.unscaled_share * self._unscaled_elements + upper_share * elements
        self._unscaled_elements += elements
        self.unscaled_share = above / max(1, self._unscaled_elements)

    def divisor(self, optimizers: Iterable[torch.optim.Optimizer]) -> Tensor:
        """Returns what the gradients of `optimizers` must be divided by: the scale, or 1 after `unscaled`."""
        # Callers compare by identity with `scale`, which costs no host read.
        done = all(id(optimizer) in self.unscaled_by for optimizer in optimizers)
        return torch.ones_like(self.scale) if done else self.scale

    def begin_backward(self) -> None:
        """Notes that a backward pass begins; raises if its gradients would be added to unscaled ones."""
        if any(parameter.grad is not None for parameter in self._unscaled):
            raise RuntimeError(
                "A backward pass of a scaled loss was begun after `scaler.unscaled(...)`, and would add scaled "
                "gradients to unscaled ones. Run all backward passes first, then `unscaled`, then `scaler.step(...)`; "
                "to discard what was unscaled, call `optimizer.zero_grad()`."
            )
        self.unscaled_by.clear()
        self._unscaled.clear()
        if self.backward_begun:
            # Cleared between two backward passes: no longer stale.
            self.stale = [parameter for parameter in self.stale if parameter.grad is not None]
        else:
            self.backward_begun = True
            self.stale = self._find_stale()

    def _on_backward(self, made_with: Tensor, finite: Tensor, grad: Tensor) -> Tensor | None:
        """Begins the backward pass of a loss, and multiplies it to the scale of the open window if that is another."""
        # A loss may be scaled before a `step` and differentiated after it. Its gradients then belong to the next step,
        # and must have that step's scale.
        window = self._current()
        window.begin_backward()
        if window is not self:
            window.loss_finite = window.loss_finite & finite
        if window.scale is made_with:
            return None
        return grad * (window.scale / made_with).to(grad.device, grad.dtype)


class Windows:
    """Opens windows at the scale of the rule, and checks that no gradient of one is used in another.

    Attributes:
        open: the window that is open; None between a step and the next loss.
    """

    def __init__(self, rule: Rule, names: Names) -> None:
        self.open: Window | None = None
        self._rule = rule
        self._names = names
        self._stale = StaleGradients(names.modules)

    def get(self, device: torch.device) -> Window:
        """Returns the open window, or opens one. The first decides that the scale is kept on `device`."""
        if self.open is None:
            self._rule.settle(device)
            self.open = Window(self._rule.scale, self._stale.uncleared, current=lambda: self.get(device))
        return self.open

    def ready(self, optimizers: Sequence[Optimizer]) -> Window:
        """Returns the window whose gradients are used, or raises if the order of calls is wrong."""
        window = check_order(self.open)
        refuse_some_unscaled(window, optimizers)
        try:
            refuse_stale(window, optimizers, self._names)
            refuse_unknown_parameters(window, optimizers, self._names)
        except RuntimeError:
            # These gradients have no known scale: closed, so that they must be cleared and cannot be stepped later.
            self.close(optimizers)
            raise
        return window

    def close(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Ends the window, if one is open. Gradients that exist now must be cleared before the next one begins."""
        self.open = None
        self._stale.remember(optimizers)


def map_losses(function: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    """Returns `outputs` with `function` applied to every loss in a nested structure of containers."""

    def visit(output: Any) -> Tensor:
        if isinstance(output, Tensor) and is_functorch_wrapped_tensor(output):
            raise RuntimeError(
                "`scale` keeps track of a loss until the next step, and one inside a `torch.func` transform does not "
                "exist after it. Multiply by `scaler.loss_scale` there, and divide the gradients by it."
            )
        if isinstance(output, Tensor) and (output.is_floating_point() or output.is_complex()):
            return function(output)
        kind = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            "`scale` takes a loss, which is a floating-point tensor, or lists, tuples and dicts of losses. "
            f"Received: {kind}. Pass the loss itself, not its `.item()`."
        )

    return tree_map(visit, outputs)
