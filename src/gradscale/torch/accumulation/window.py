"""The accumulation window: one scale, and any number of losses and backward passes, between two steps."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_map

from gradscale.kernels.torch import largest
from gradscale.policies.static import multiplies
from gradscale.torch.accumulation.leaves import leaves_of
from gradscale.torch.accumulation.stale import StaleGradients
from gradscale.torch.accumulation.unscaled import Unscaled
from gradscale.torch.checks import check_order, refuse_stale, refuse_unknown_parameters
from gradscale.torch.local import local
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Names, values_of
from gradscale.torch.step.host_copy import moved

Optimizer = torch.optim.Optimizer
Mark = Callable[[Tensor], Tensor | None]


class Held(NamedTuple):
    """A gradient as a backward pass left it.

    Attributes:
        parameter: the parameter that held it.
        grad: the gradient.
        version: its version, which counts writes in place.
    """

    parameter: Tensor
    grad: weakref.ref[Tensor]
    version: int

    @classmethod
    def now(cls, parameters: Iterable[Tensor]) -> "Iterator[Held]":
        """Yields the gradients that `parameters` hold now."""
        for parameter in parameters:
            if (grad := parameter.grad) is not None:
                yield cls(parameter, weakref.ref(grad), grad._version)

    @property
    def written(self) -> bool:
        """Whether the gradient was replaced, or written to in place as `zero_grad(set_to_none=False)` does."""
        grad = self.parameter.grad
        return grad is None or grad is not self.grad() or grad._version != self.version


class Window:
    """What happened since the last step: losses scaled, backward passes begun, stale gradients found.

    Attributes:
        scale: the scale of all losses of this window, of every micro-batch. Only a retry changes it.
        loss_finite: whether every loss that was differentiated so far was finite, a 0-d bool.
        overflowed: whether gradients overflowed outside of `step`, although the losses until then were finite.
        backward_begun: whether a backward pass has begun.
        stale: parameters that held gradients of an earlier window when the first backward pass of this one began.
        retries: how often a backward pass was run again.
        rescaled: ids of the parameters whose gradients a retry has multiplied to its scale; None without one.
        unscaled: the gradients that are unscaled already.
        untold: whether a loss or an overflow was noted of which the gradients do not tell other ranks.
    """

    def __init__(
        self,
        scale: Tensor,
        gradients: StaleGradients,
        begin: Callable[[], "Window"],
        mark: "Mark | None" = None,
        *,
        multiplies: bool = True,
    ) -> None:
        """Opens a window.

        Args:
            scale: the scale of its losses.
            gradients: finds stale gradients when the first backward pass begins.
            begin: begins a backward pass, and returns the window that is open then: another one, for a loss whose
                backward pass comes late.
            mark: returns what the gradient of a loss is multiplied by, to tell other ranks whether the loss is finite;
                None if they need not be told so.
            multiplies: whether losses are multiplied at all, and not left as they are because the scale is always 1.
        """
        # A step inside `torch.inference_mode()` makes a scale that autograd cannot keep for the backward pass.
        self.scale = scale.clone() if scale.is_inference() else scale
        self.loss_finite = torch.ones((), dtype=torch.bool, device=scale.device)
        self.overflowed = ~self.loss_finite
        self.backward_begun = False
        self.stale: list[Tensor] = []
        self.retries = 0
        self.rescaled: set[int] | None = None
        self.unscaled = Unscaled(scale)
        self._gradients = gradients
        self._begin = begin
        self._mark = mark
        self._multiplies = multiplies
        self.untold = False
        self._left_gradients = False
        self._left: list[Held] = []

    def scaled(self, output: Tensor, *, counts: bool = True) -> Tensor:
        """Returns `output` times the scale, with a hook on its backward pass, which notes whether `output` is finite.

        Unless it `counts`, that is not noted.
        """
        scaled = self.product(output)
        if scaled.requires_grad:
            self._gradients.note_graph(scaled)
            # Stale gradients are searched for when the backward pass begins: at `scale` it is too early, since
            # `zero_grad` may still follow, and at `step` it is too late, since autograd has added to them in place.
            scaled.register_hook(partial(self._on_backward, self.scale, self.is_finite(output) if counts else None))
        return scaled

    def product(self, output: Tensor) -> Tensor:
        """Returns `output` times the scale, in float32 if it was narrower: FP16 cannot hold `1.0 * 65536`."""
        if not self._multiplies:
            return output.view_as(output)  # a tensor of its own, for the hook on its backward pass
        wide = output.float() if output.dtype.itemsize < 4 else output
        return wide * moved(self.scale, output.device, wide.dtype)

    def unscale(self, grad: Tensor) -> Tensor:
        """Returns a gradient divided by the scale, in float32 if it was narrower; differentiable."""
        wide = grad.float() if grad.dtype.itemsize < 4 else grad
        return wide * moved(1.0 / self.scale, grad.device, wide.dtype) if self._multiplies else wide

    def is_finite(self, output: Tensor) -> Tensor:
        """Returns whether `output` is finite, a 0-d bool on the scaler's device: of a DTensor, the part held here.

        The step asks all ranks. A sum of parts is not finite if one of them is not.
        """
        # Times 0: NaN if the loss is inf or NaN, else 0. `isfinite` takes twice as many kernels.
        return (local(output.detach()) * 0 == 0).all().to(self.scale.device)

    def note_loss(self, finite: Tensor) -> None:
        """Notes whether a loss, whose backward pass begins, is finite."""
        # Not before: a loss that is never differentiated, of an abandoned batch or of a validation, gives no gradient.
        self.loss_finite = self.loss_finite & finite

    def note_overflow(self, overflowed: Tensor) -> None:
        """Notes that gradients taken outside of `step` overflowed, so that a loss made from them is not the cause.

        A loss that was not finite before them takes precedence.
        """
        self.untold = True
        self.overflowed = self.overflowed | (overflowed.to(self.scale.device) & self.loss_finite)

    @property
    def abandoned(self) -> bool:
        """Whether all gradients that the backward passes have left were cleared: the batch was given up."""
        return self._left_gradients and next(Held.now(self._gradients.watched()), None) is None

    def begin_backward(self) -> None:
        """Notes that a backward pass begins; raises if its gradients would be added to unscaled ones."""
        if self.unscaled:
            self.unscaled.refuse_backward()
            self.unscaled.forget()
        if self.backward_begun:
            self._note_cleared()
        else:
            self.backward_begun = True
            self.stale = self._gradients.uncleared()
        # Until `end_backward`, which a backward pass that raises does not reach.
        self._left_gradients, self._left = True, []

    def end_backward(self) -> None:
        """Notes some gradients that the backward pass has left, to see before the next one if they were cleared."""
        # The first of all shows that, and of stale gradients each. All of them would cost as much as a step's Python.
        self._left = [*islice(Held.now(self._gradients.watched()), 1), *Held.now(self.stale)]
        self._left_gradients = bool(self._left)

    def _note_cleared(self) -> None:
        """Drops what the window knows of gradients that were cleared between two backward passes."""
        written = {id(held.parameter) for held in self._left if held.written}
        self.stale = [each for each in self.stale if each.grad is not None and id(each) not in written]
        if self._left and self._left[0].written and self._left[0].parameter.grad is not None:
            # Cleared in place, or edited: zeros are the proof. Read on the device, without a synchronization.
            values = [values_of(each, each.grad) for each in self._gradients.watched() if each.grad is not None]
            cleared = largest(values, self.scale.device).sum() == 0
            self.loss_finite, self.overflowed = self.loss_finite | cleared, self.overflowed & ~cleared

    def _on_backward(self, made_with: Tensor, finite: Tensor | None, grad: Tensor) -> Tensor:
        """Begins the backward pass of a loss, and returns its gradient for the scale of the open window.

        Marked, if the loss is not finite and other ranks must know.
        """
        # A loss may be scaled before a `step` and differentiated after it. Its gradients then belong to the next step,
        # and must have that step's scale.
        window = self._begin()
        mark = None
        if finite is not None:
            window.note_loss(finite)
            mark = self._mark(finite) if self._mark else None
        after_backward(window.end_backward)
        factors = [mark, None if window.scale is made_with else window.scale / made_with]
        for factor in factors:
            grad = grad if factor is None else grad * factor.to(grad.device, grad.dtype)
        return grad


class Windows:
    """Opens windows at the scale of the rule, and checks that no gradient of one is used in another.

    Attributes:
        open: the window that is open; None between a step and the next loss.
    """

    def __init__(self, rule: Rule, names: Names, mark: Mark | None = None) -> None:
        self.open: Window | None = None
        self._mark = mark
        self._rule = rule
        self._names = names
        self._stale = StaleGradients(names.modules)
        self._begun = -1

    def get(self, device: torch.device) -> Window:
        """Returns the open window, or opens one. The first decides that the scale is kept on `device`."""
        if self.open is None:
            self._rule.settle(device)
            begin, scales = partial(self.begin, device), multiplies(self._rule.policy)
            self.open = Window(self._rule.scale, self._stale, begin, self._mark, multiplies=scales)
        return self.open

    def begin(self, device: torch.device) -> Window:
        """Returns the window of a backward pass that begins: a new one, if the batch of the open one was abandoned.

        A pass begins once, whatever number of scaled losses it has.
        """
        running = torch._C._current_graph_task_id()  # -1 outside of one
        if self.open is not None and running == self._begun != -1:
            return self.open
        self._begun = running
        if self.open is not None and self.open.abandoned:
            # What is known of its losses and gradients would be held against the next batch.
            self.open = None
        window = self.get(device)
        window.begin_backward()
        return window

    def ready(self, optimizers: Sequence[Optimizer]) -> Window:
        """Returns the window whose gradients are used, or raises if the order of calls is wrong."""
        window = check_order(self.open)
        try:
            refuse_stale(window, optimizers, self._names)
            refuse_unknown_parameters(window, optimizers, self._names)
        except RuntimeError:
            # These gradients have no known scale: closed, so that they must be cleared and cannot be stepped later.
            self.close(optimizers)
            raise
        return window

    def any_written(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether one of `parameters` has a gradient that was made or written to since the last step."""
        stale = {id(each) for each in self._stale.uncleared()}
        return any(each.grad is not None and id(each) not in stale for each in parameters)

    def sharing_the_scale(self, loss: Tensor) -> list[Tensor]:
        """Returns every known tensor whose gradient has the scale, or gets it from the backward pass of `loss`."""
        self._stale.note_graph(loss)
        known = chain(self._stale.watched(), leaves_of(loss))
        # A parameter that was frozen since an earlier micro-batch has a gradient, too.
        return list({id(each): each for each in known if each.requires_grad or each.grad is not None}.values())

    def close(self, optimizers: Sequence[Optimizer] = (), *, zeros: bool = True) -> None:
        """Ends the window, if one is open. Gradients that exist now must be cleared before the next one begins.

        Without `zeros`, only those that are not zeros, which synchronizes with the device.
        """
        self.open = None
        self._stale.remember(optimizers, zeros=zeros)


def after_backward(function: Callable[[], None]) -> None:
    """Calls `function` at the end of the backward pass that runs now, after all that was queued until its last node."""
    # Queued again at the end: FSDP2 reduces gradients in a callback that is queued after the loss' hook was called.
    queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
    queue(partial(queue, function))


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
