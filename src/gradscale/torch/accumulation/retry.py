"""Retries: the backward pass is run again at a lower scale when it overflows, so that no batch is lost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.engine.decide import check_retries
from gradscale.torch.accumulation.graph import free
from gradscale.torch.accumulation.window import Window
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import numbers_of
from gradscale.torch.step.measure import measure_sizes

AnyRank = Callable[[Tensor], list[bool]]
"""Returns which of a few flags are set on any of the ranks that share the scale. Synchronizes with the device."""


class Stash:
    """Gradients of earlier micro-batches, set aside while a backward pass is attempted."""

    # Autograd adds to the `.grad` that it finds, so that a failed attempt could not be taken out of the sum again. With
    # `.grad` set to None each attempt has gradients of its own. `torch.autograd.grad` would return them too, but fires
    # no post-accumulate hooks and does not work with reentrant checkpointing.

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._earlier = [parameter.grad for parameter in parameters]
        self._hooks = {id(each): _taken_from(each._post_accumulate_grad_hooks) for each in parameters}
        self.clear()

    def clear(self) -> None:
        """Drops the gradients of the attempt."""
        for parameter in self._parameters:
            parameter.grad = None

    def overflowed(self, device: torch.device) -> Tensor:
        """Returns whether a gradient of the attempt is not finite, a 0-d bool on `device`."""
        dense = [numbers_of(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        return ~torch.isfinite(measure_sizes(dense, device).total)

    @torch.no_grad()
    def multiply(self, ratio: Tensor) -> None:
        """Multiplies the gradients of the attempt by the ratio of two scales."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                _multiply(parameter.grad, ratio)

    @torch.no_grad()
    def merge(self, ratio: Tensor | None) -> None:
        """Adds the gradients of the attempt to the earlier ones, which are first multiplied by the ratio of the scales.

        That is exact if the ratio is a power of two, unless a gradient becomes subnormal. Hooks that wait for a
        gradient to be accumulated are then called.
        """
        attempted = [parameter for parameter in self._parameters if parameter.grad is not None]
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is None:
                continue
            if ratio is not None:
                _multiply(earlier, ratio)
            parameter.grad = earlier if parameter.grad is None else _sum(earlier, parameter.grad)
        self._put_hooks_back()
        for parameter in attempted:
            for hook in self._hooks[id(parameter)].values():
                hook(parameter)

    def restore(self) -> None:
        """Puts the earlier gradients back, as if there had been no attempt."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier
        self._put_hooks_back()

    def _put_hooks_back(self) -> None:
        for parameter in self._parameters:
            if hooks := self._hooks[id(parameter)]:
                parameter._post_accumulate_grad_hooks.update(hooks)  # type: ignore[attr-defined]


def _multiply(grad: Tensor, ratio: Tensor) -> None:
    (grad._values() if grad.is_sparse else grad).mul_(ratio.to(grad.device))


def _sum(earlier: Tensor, later: Tensor) -> Tensor:
    """Returns the sum, in the memory of `earlier` unless it is sparse and `later` is not."""
    return later + earlier if earlier.is_sparse and not later.is_sparse else earlier.add_(later)


def _taken_from(hooks: dict[int, Any] | None) -> dict[int, Any]:
    """Returns the hooks, and takes them out of the dict that autograd calls them from."""
    # They would see the inf of a failed attempt, and an optimizer that steps inside one would apply it.
    taken = dict(hooks or {})
    if hooks:
        hooks.clear()
    return taken


class Scaling(Protocol):
    """A scale that losses are multiplied by, and that a retry lowers."""

    @property
    def scale(self) -> Tensor:
        """The present scale."""
        ...

    def product(self, loss: Tensor) -> Tensor:
        """Returns `loss` times the scale."""
        ...

    def lowered(self) -> tuple[Any, Tensor]:
        """Returns the state after one backoff, and its scale. Changes nothing."""
        ...

    def lower(self, state: Any, scale: Tensor) -> None:
        """Makes what `lowered` returned the present state, and counts a retry."""
        ...


@dataclass(frozen=True, slots=True)
class WindowScale:
    """The scale of a window, lowered by its rule."""

    rule: Rule
    window: Window

    @property
    def scale(self) -> Tensor:
        """The scale of the window."""
        return self.window.scale

    def product(self, loss: Tensor) -> Tensor:
        """Returns `loss` times the scale."""
        return self.window.product(loss)

    def lowered(self) -> tuple[Any, Tensor]:
        """Returns the state after one backoff, whatever the hysteresis says, and its scale."""
        state = self.rule.lowered(self.rule.state)
        return state, self.rule.tensor(state.scale)

    def lower(self, state: Any, scale: Tensor) -> None:
        """Backs off once."""
        self.rule.state, self.window.scale = state, scale
        self.window.retries += 1


@dataclass(frozen=True, slots=True)
class Retry:
    """A backward pass that may be run again.

    Attributes:
        parameters: all whose gradients share the scale.
        rule: the rule that lowers the scale.
        any_rank: returns which of a few flags are set on any of the ranks that share the scale.
    """

    parameters: Sequence[Tensor]
    rule: Rule
    any_rank: AnyRank

    def backward(self, loss: Tensor, window: Window, retries: int, kwargs: dict[str, Any]) -> None:
        """Runs the backward pass of `loss`, again at lower scales while it overflows, at most `retries` times more.

        Synchronizes with the device once after every attempt. If the last attempt overflows too, the rule is restored,
        and the gradients keep the scale of that attempt. If the backward pass raises, nothing has changed.
        """
        before, scale, earlier_retries, losses = self.rule.state, window.scale, window.retries, window.loss_finite
        stash = Stash(self.parameters)
        try:
            finite = window.is_finite(loss)
            window.note_loss(finite)
            window.untold = True  # nothing marks its gradients
            scaling = WindowScale(self.rule, window)
            overflowed = attempt(loss, finite, scaling, stash, self.any_rank, retries, kwargs)
        except BaseException:
            stash.restore()
            self.rule.state, window.scale, window.retries, window.loss_finite = before, scale, earlier_retries, losses
            raise
        if overflowed:
            # The step that follows backs off once. Gradients that are NaN at any scale would otherwise bring it to the
            # floor with every batch.
            self.rule.state = before
        if window.scale is not scale:
            window.rescaled = {id(parameter) for parameter in self.parameters}
        stash.merge(None if window.scale is scale else window.scale / scale)


def attempt(
    loss: Tensor,
    finite: Tensor,
    scaling: Scaling,
    stash: Stash,
    any_rank: AnyRank,
    retries: int,
    kwargs: dict[str, Any],
) -> bool:
    """Runs the backward pass until it does not overflow or no retry is left; returns whether it overflowed.

    There is none for a loss that is not `finite`, and at the lowest scale. Synchronizes once after every attempt.
    """
    keeps_graph = bool(kwargs.pop("retain_graph", None))
    for tried in range(retries + 1):
        again = tried < retries
        scaling.product(loss).backward(retain_graph=keeps_graph or again, **kwargs)
        state, scale = scaling.lowered() if again else (None, scaling.scale)
        # All in one read. All ranks make the same decisions, or their collectives would not match.
        flags = torch.stack([stash.overflowed(scale.device), ~finite, scale >= scaling.scale])
        overflowed, bad_loss, at_floor = any_rank(flags)
        if not overflowed or bad_loss or at_floor:
            if again and not keeps_graph and not kwargs.get("inputs"):
                free(loss)
            return overflowed
        scaling.lower(state, scale)
        stash.clear()
    return True


def check_backward(retries: int, kwargs: dict[str, Any]) -> None:
    """Raises unless `retries` is a count, and nothing keeps the backward pass from being run again."""
    check_retries(retries)
    if retries and kwargs.get("create_graph"):
        raise ValueError(
            "`retries` sets gradients aside and adds them up later, which `create_graph=True` cannot differentiate. "
            "Pass one of the two; for a gradient penalty use `LossScaler.grad(loss, inputs, create_graph=True)`."
        )


def check_retriable(modules: Sequence[nn.Module]) -> None:
    """Raises if the modules are not known, or one of them synchronizes its gradients during the backward pass."""
    if not modules:
        raise RuntimeError(
            "`retries` must know every parameter whose gradient shares the scale, to bring all of them to the new one. "
            "Build the scaler as `LossScaler(model)`."
        )
    for module in modules:
        if sender := synchronizing(module):
            raise RuntimeError(
                f"`retries` cannot run the backward pass of {type(sender).__name__} again: it sends its gradients to "
                f"the other ranks while it runs, once per forward pass. {_INSTEAD[_is_ddp(sender)]}"
            )


_INSTEAD = {
    False: "Call `backward(loss)` without `retries`.",
    True: "Call `backward(loss)` without `retries`, or run it inside `model.no_sync()` and reduce the gradients "
    "yourself.",
}
"""What to do in place of `retries`, by whether the module is DDP: FSDP cannot run a backward pass again at all."""


def synchronizing(root: nn.Module) -> nn.Module | None:
    """Returns the module, `root` or one inside it, that sends gradients to other ranks during the backward pass."""
    return next(filter(_sends, root.modules()), None) if dist.is_available() else None


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def _sends(module: nn.Module) -> bool:
    # DDP reduces once per forward pass, so that the gradients of a second backward pass would differ between ranks.
    if _is_ddp(module):
        return cast(bool, module.require_backward_grad_sync)
    # FSDP has freed or resharded its parameters after the first one: FSDP2 of torch 2.13 crashes in the second.
    return any(
        "FullyShardedDataParallel" in kind.__name__ or "FSDPModule" in kind.__name__ for kind in type(module).__mro__
    )
