"""The accumulation window: one scale, and any number of losses and backward passes, between two steps."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._compile import _disable_dynamo

from gradscale.torch.bf16 import FirstLoss
from gradscale.torch.checks import out_of_order, refuse_stale
from gradscale.torch.gradients import Names, local, parameters_below, parameters_of
from gradscale.torch.host import Rule, RuleState, to_device
from gradscale.torch.window.unscaled import Unscaled, all_zero

Optimizer = torch.optim.Optimizer


class Held(NamedTuple):
    """A gradient as it was when it was noted.

    Attributes:
        parameter: the parameter that held it.
        grad: the gradient.
        version: its version, which counts writes in place.
    """

    # A weak reference: a strong one would keep the memory of a gradient after `zero_grad`.
    parameter: Tensor
    grad: weakref.ref[Tensor]
    version: int

    @property
    def uncleared(self) -> bool:
        """Whether the parameter holds it still, or an edit of it that is not all zeros, which synchronizes."""
        return bool(unwritten([self])) or not all_zero([self.parameter])


def unwritten(held: Iterable[Held]) -> list[Held]:
    """Returns those that their parameters hold still, and nobody has written to, as `zero_grad` does, since."""
    present = [(each, grad) for each in held if (grad := each.parameter.grad) is not None]
    return [each for each, grad in present if grad is each.grad() and grad._version == each.version]


def held_by(parameters: Iterable[Tensor]) -> list[Held]:
    """Returns the gradients that `parameters` hold now."""
    return [Held(each, weakref.ref(grad), grad._version) for each in parameters if (grad := each.grad) is not None]


@dataclass(eq=False)
class Window:
    """What happened since the last step: losses scaled, backward passes begun, stale gradients found.

    Attributes:
        rule: the rule of the scale.
        scale: the scale of all its losses, on the device. Only a retry changes it.
        passes: backward passes begun.
        left_gradients: whether the last of them has left gradients; True while it runs.
        stale: gradients of an earlier window that a backward pass of this one was added to.
        retries: how often a backward pass was run again.
        unscaled: the gradients that are unscaled already; None if none are.
        synced: whether the last backward pass was outside of DDP's `no_sync`.
        ahead: the packed state of the rule when the window was opened, if it was on the device.
        steps: how many steps the rule had followed.
        notes: losses, and marks: inf where gradients overflowed outside of the step, else 0; and which of the two each
            is. In the order they came.
        at_end: called with the window when a backward pass has ended; None for nothing.
    """

    rule: Rule
    scale: Tensor = field(init=False)
    ahead: Tensor | None = field(init=False)
    steps: int = field(init=False)
    passes: int = 0
    left_gradients: bool = False
    stale: list[Held] = field(default_factory=list)
    retries: int = 0
    unscaled: Unscaled | None = None
    synced: bool = False
    notes: list[tuple[bool, Tensor]] = field(default_factory=list)
    at_end: Callable[["Window"], None] | None = None

    widened: ClassVar[tuple[torch.dtype, ...]] = torch.float16, torch.bfloat16

    def __post_init__(self) -> None:
        self.ahead = self.rule.ahead
        now = self.rule.catch_up(waits=self.ahead is None)
        if self.ahead is None:
            self.start, self.steps = now, now.steps
            self.divisor, self.scale = np.float32(now.state.scale), self.rule.scale_of(now.state)
            return
        self.steps, self.scale = self.rule.steps, self.rule.scale
        if now.steps == self.steps and not self.rule.capturable:
            self.start = now  # else the host does not know it yet

    @cached_property
    def start(self) -> RuleState:
        """Where the rule was when the window was opened. Synchronizes where the device runs the rule."""
        assert self.ahead is not None  # noqa: S101
        return self.rule.read(self.ahead)

    @cached_property
    def divisor(self) -> np.float32:
        """The scale on the host. Synchronizes where the device runs the rule."""
        return np.float32(self.start.state.scale)

    def product(self, output: Tensor) -> Tensor:
        """Returns `output` times the scale, in float32 if it was narrower: FP16 cannot hold `1.0 * 65536`."""
        if not self.rule.multiplies:
            return output.view_as(output)  # a tensor of its own, for the hook on its backward pass
        wide = output.float() if output.dtype in self.widened else output
        return wide * to_device(self.scale, output.device)

    def rescaled(self, grad: Tensor, made_with: Tensor) -> Tensor:
        """Returns the gradient of a loss that was scaled by `made_with`, for the scale of this window."""
        return grad * to_device(self.scale / made_with, grad.device, grad.dtype)

    def note_loss(self, loss: Tensor) -> None:
        """Notes a loss whose backward pass begins: of a DTensor, the part held here. The step asks all ranks."""
        # Not before: a loss that is never differentiated, of an abandoned batch or of a validation, gives no gradient.
        # Kept as it is, so that nothing is computed on the device until the step, which reads all of them at once.
        held = local(loss.detach())
        held = torch.view_as_real(held) if held.is_complex() else held
        self.notes.append((False, held.sum(dtype=torch.float32) if held.ndim else held.float()))

    def note_overflow(self, overflowed: Tensor) -> None:
        """Notes whether gradients taken outside of `step` overflowed, so that a loss made from them is not the cause.

        A loss that was not finite before them takes precedence.
        """
        self.notes.append((True, torch.where(overflowed.to(self.scale.device), math.inf, 0.0)))

    def flags(self) -> tuple[Tensor, Tensor]:
        """Returns whether every loss was finite, and whether gradients overflowed outside of the step.

        As 0-d bools on the device, for ranks. The overflow is the cause of a loss that was made from its gradients,
        but not of one before.
        """
        loss_finite = torch.ones((), dtype=torch.bool, device=self.scale.device)
        overflowed = ~loss_finite
        for marked, note in self.notes:
            finite = torch.isfinite(to_device(note, self.scale.device))
            if marked:
                overflowed = overflowed | (loss_finite & ~finite)
            else:
                loss_finite = loss_finite & finite
        return loss_finite | overflowed, overflowed


class Watched:
    """The parameters whose gradients have the scale: those of the modules and of all `optimizers` that were stepped.

    And the gradients `held` when a step ends, which must be cleared before the next one: not only those of the
    step, since a generator's backward pass fills the gradients of the discriminator. A gradient is recognized by
    identity and version, and nothing is read from the device: `zero_grad(set_to_none=False)` counts as clearing, as
    does any other write in place, until a backward pass is added to it.
    """

    # References are weak. A strong one to a gradient would keep its memory after `zero_grad`; one to an optimizer, the
    # parameters of a model that was replaced.
    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._modules = modules
        # FSDP2 keeps gradients in shards, which take the place of the modules' parameters outside of forward and
        # backward passes only.
        shards = [each for each in parameters_below(modules) if hasattr(each, "to_local")]
        self._shards = list(map(weakref.ref, shards))
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.held: list[Held] = []

    def __reduce__(self) -> tuple[type["Watched"], tuple[Sequence[nn.Module]]]:
        """A copy starts empty."""
        return Watched, (self._modules,)

    def __iter__(self) -> Iterator[Tensor]:
        """Yields all of them, looked up now: groups and modules may be added or replaced."""
        yield from parameters_of(self.optimizers)
        yield from parameters_below(self._modules)
        yield from [parameter for reference in self._shards if (parameter := reference()) is not None]

    def remember(self, optimizers: Sequence[Optimizer], *, zeros: bool = True) -> None:
        """Watches the parameters of `optimizers` too, and notes the gradients that all hold now.

        Without `zeros` only those that are not all zeros, which synchronizes with the device.
        """
        self.optimizers.update(optimizers)
        held = {id(each): each for each in self}.values()
        self.held = held_by(held if zeros else [each for each in held if not all_zero([each])])


class Windows:
    """Opens windows at the scale of the rule, and checks that no gradient of one is used in another.

    Attributes:
        open: the window that is open; None between a step and the next loss.
        watched: the parameters whose gradients have the scale.
        first_loss: what the first loss shows.
    """

    def __init__(self, rule: Rule, names: Names) -> None:
        self.open: Window | None = None
        self.watched = Watched(names.modules)
        self.first_loss = FirstLoss()
        self._rule = rule
        self._names = names
        self._reducing = [each for each in names.modules if hasattr(each, "require_backward_grad_sync")]
        self._begun = -1
        self._runs = False  # inside of `backward`
        self._uncleared: list[Held] = []

    def get(self, device: torch.device) -> Window:
        """Returns the open window, or opens one. The first decides that the scale is kept on `device`."""
        # A captured step must read the scale itself: that of a loss before it, as of a validation, would never change.
        if self.open is None or (self._rule.capturable and not self.open.passes):
            self._rule.device = self._rule.device or device
            self.open = Window(self._rule)
        return self.open

    def backward(self, loss: Tensor, kwargs: Mapping[str, Any]) -> None:
        """Runs the backward pass of `loss` times the scale."""
        check_loss(loss)
        if not self.first_loss.seen:
            self.first_loss.note(loss, self._rule.policy, "LossScaler")
        window = self.begin(loss.device)
        window.note_loss(loss)
        self._runs = True
        try:
            window.product(loss).backward(**kwargs)
        finally:
            self._runs = False
        self.end_backward(window, ended=True)

    def scaled(self, loss: Tensor, *, counts: bool = True) -> Tensor:
        """Returns `loss` times the scale, with a hook on its backward pass, which notes it unless not to `counts`."""
        check_loss(loss)
        if not self.first_loss.seen:
            self.first_loss.note(loss, self._rule.policy, "LossScaler")
        window = self.get(loss.device)
        scaled = window.product(loss)
        if scaled.requires_grad:
            # Stale gradients are searched for when the backward pass begins: at `scale` it is too early, since
            # `zero_grad` may still follow, and at `step` it is too late, since autograd has added to them in place.
            scaled.register_hook(partial(self._on_backward, window.scale, loss.detach() if counts else None))
        return scaled

    @_disable_dynamo  # compiled autograd would trace it
    def _on_backward(self, made_with: Tensor, loss: Tensor | None, grad: Tensor) -> Tensor | None:
        """Begins the backward pass of a loss, and returns its gradient for the scale of the open window."""
        # A loss may be scaled before a `step` and differentiated after it. Its gradients then belong to the next step,
        # and must have that step's scale.
        window = self.begin(grad.device)
        if loss is not None:
            window.note_loss(loss)
        return None if window.scale is made_with else window.rescaled(grad, made_with)

    def begin(self, device: torch.device) -> Window:
        """Returns the window of a backward pass that begins: a new one, if the batch of the open one was abandoned.

        It was, if all gradients that its backward passes have left were cleared. A pass begins once, whatever number of
        scaled losses it has. Outside of the engine, the caller ends it.
        """
        running = torch._C._current_graph_task_id()  # -1 outside of the engine
        if self.open is not None and (self._runs or running == self._begun != -1):
            return self.open
        self._begun = running
        if self.open is not None and self.open.left_gradients and all(each.grad is None for each in self.watched):
            # What is known of its losses and gradients would be held against the next batch.
            self.open = None
        window = self.get(device)
        if self._uncleared:  # the last backward pass has raised
            self.end_backward(window)
        window.stale = unwritten(window.stale)
        self._uncleared = unwritten(self.watched.held)
        if window.unscaled is not None:  # to which the gradients of this pass would be added
            window.unscaled.refuse_backward()
            window.unscaled = None
        window.passes += 1
        window.left_gradients = True  # until its end, which a backward pass that raises does not reach
        window.synced = all(each.require_backward_grad_sync for each in self._reducing)
        if running != -1:
            # Queued again at the end: FSDP2 reduces gradients in a callback that is queued after this hook was called.
            queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
            queue(partial(queue, partial(self.end_backward, window, ended=True)))
        return window

    def end_backward(self, window: Window, *, ended: bool = False) -> None:
        """Notes whether a backward pass has left gradients, and which were stale; calls `at_end` if it has `ended`."""
        window.left_gradients = any(each.grad is not None for each in self.watched)
        if self._uncleared or window.stale:
            # Written to by the pass, which has added to them: the rest may still be cleared before the next one.
            added = [each for each in self._uncleared if not unwritten([each])]
            window.stale = held_by([each.parameter for each in (*window.stale, *added)])
            self._uncleared = []
        if ended and window.at_end is not None:
            window.at_end(window)

    def ready(self, optimizers: Sequence[Optimizer]) -> Window:
        """Returns the window whose gradients are used, or raises if the order of calls is wrong."""
        window = self.open
        if window is None or not window.passes:
            raise out_of_order(window)
        if self._uncleared:  # the end of the last backward pass was not seen: it has raised, or was compiled
            self.end_backward(window)
            window.stale = [each for each in window.stale if not all_zero([each.parameter])]
        if left := [*window.stale, *unwritten(self.watched.held)]:
            try:
                refuse_stale(left, optimizers, self._names)
            except RuntimeError:
                # These gradients have no known scale: closed, so that they must be cleared and cannot be stepped later.
                self.close(optimizers)
                raise
        return window

    def any_written(self, parameters: Sequence[Tensor]) -> bool:
        """Returns whether one of `parameters` has a gradient that was made or written to since the last step."""
        stale = {id(each.parameter) for each in unwritten(self.watched.held)}
        return any(each.grad is not None and id(each) not in stale for each in parameters)

    def close(self, optimizers: Sequence[Optimizer] = (), *, zeros: bool = True) -> None:
        """Ends the window, if one is open. Gradients that exist now must be cleared before the next one begins.

        Without `zeros`, only those that are not zeros, which synchronizes with the device.
        """
        self.open, self._uncleared = None, []
        self.watched.remember(optimizers, zeros=zeros)


def check_loss(output: Any) -> None:
    """Raises unless `output` is a loss whose scale can be kept track of."""
    if not (isinstance(output, Tensor) and (output.is_floating_point() or output.is_complex())):
        kind = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            "`scale` takes a loss, which is a floating-point tensor, or lists, tuples and dicts of losses. "
            f"Received: {kind}. Pass the loss itself, not its `.item()`."
        )
    if is_functorch_wrapped_tensor(output):
        raise RuntimeError(
            "`scale` keeps track of a loss until the next step, and one inside a `torch.func` transform does not "
            "exist after it. Multiply by `scaler.loss_scale` there, and divide the gradients by it."
        )
