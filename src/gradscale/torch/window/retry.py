"""Retries: the backward pass is run again at a lower scale when it overflows, so that no batch is lost."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.engine.decide import check_retries
from gradscale.kernels.torch import largest
from gradscale.torch.gradients import numbers_of
from gradscale.torch.host import Rule
from gradscale.torch.window.autograd import free, leaves_of
from gradscale.torch.window.unscaled import all_zero
from gradscale.torch.window.window import Window

AnyRank = Callable[[Tensor], list[bool]]
"""Returns which of a few flags are set on any of the ranks that share the scale. Synchronizes with the device."""


class Stash:
    """Gradients and hooks of parameters, set aside while a backward pass is tried."""

    # With `.grad` set to None each attempt has gradients of its own. `torch.autograd.grad` would return them too, but
    # fires no post-accumulate hooks and does not work with reentrant checkpointing. The hooks would see the inf of a
    # failed attempt, and an optimizer that steps inside one would apply it.

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._earlier = [parameter.grad for parameter in parameters]
        found: list[dict[int, Any] | None] = [each._post_accumulate_grad_hooks for each in parameters]  # type: ignore[attr-defined]
        self._hooks = [(hooks, dict(hooks)) for hooks in found if hooks]
        self._hooked = [each for each, hooks in zip(parameters, found, strict=True) if hooks]

    def begin(self) -> None:
        """Sets them aside, until `keep` or `restore`."""
        self.clear()
        for hooks, _ in self._hooks:
            hooks.clear()

    def clear(self) -> None:
        """Drops the gradients of an attempt."""
        for parameter in self._parameters:
            parameter.grad = None

    def keep(self) -> None:
        """Keeps the gradients of the attempt, and puts the hooks back."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier if parameter.grad is None else parameter.grad
        self._put_hooks_back()

    def call_hooks(self) -> None:
        """Calls the hooks that wait for the gradients."""
        for parameter, (_, hooks) in zip(self._hooked, self._hooks, strict=True):
            for hook in hooks.values() if parameter.grad is not None else ():
                hook(parameter)

    def restore(self) -> None:
        """Puts gradients and hooks back, as if there had been no attempt."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier
        self._put_hooks_back()

    def _put_hooks_back(self) -> None:
        for hooks, taken in self._hooks:
            hooks.update(taken)


def backward_with_retries(
    loss: Tensor,
    window: Window,
    rule: Rule,
    retries: int,
    any_rank: AnyRank,
    watched: Iterable[Tensor],
    owned: Sequence[Tensor],
    kwargs: dict[str, Any],
) -> None:
    """Runs the backward pass of `loss`, again at lower scales while it overflows, at most `retries` times more.

    There is no retry after another backward pass of the window, while a parameter holds an earlier gradient, for a loss
    that is not finite, and at the lowest scale. Synchronizes once after every attempt. If the last attempt overflows
    too, the rule is as before, and the gradients keep the scale of that attempt. If the backward pass raises, nothing
    has changed.

    Args:
        loss: a scalar loss, not scaled.
        window: the window whose scale is lowered.
        rule: the rule that lowers it.
        retries: how often the backward pass may be run again.
        any_rank: returns which flags are set on any rank.
        watched: the known parameters whose gradients have the scale, beside the leaves of the graph.
        owned: those whose overflow is one of the step: of optimizers. Others may be NaN for good. All while none is
            known.
        kwargs: passed on to `Tensor.backward`.
    """
    tensors = list({id(each): each for each in (*watched, *owned, *leaves_of(loss))}.values())
    earlier = [each for each in tensors if each.grad is not None]
    if window.passes > 1 or (earlier and not all_zero(earlier)):
        window.note_loss(loss)
        window.product(loss).backward(**kwargs)
        return
    start, scale, keeps_graph = rule.state, window.scale, bool(kwargs.pop("retain_graph", None))
    stash, ours = Stash(tensors), {id(each) for each in owned}
    checked = [each for each in tensors if id(each) in ours] if ours else tensors
    state, tried = start, 0
    try:
        stash.begin()
        while True:
            again = tried < retries
            window.product(loss).backward(retain_graph=keeps_graph or again, **kwargs)
            lowered = rule.lowered(state) if again else state
            at_floor = not lowered.scale < state.scale
            # One read. All ranks make the same decisions, or their collectives would not match.
            flags = torch.stack([_overflowed(checked, scale.device), ~_is_finite(loss, scale.device)])
            overflowed, bad_loss = any_rank(flags)
            if not overflowed or bad_loss or at_floor:
                break
            state, tried = lowered, tried + 1
            window.scale, window.divisor = rule.scale_of(state), np.float32(state.scale)
            stash.clear()
        if tried < retries and not keeps_graph and not kwargs.get("inputs"):
            free(loss)
        stash.keep()
    except BaseException:
        stash.restore()
        window.scale, window.divisor = scale, np.float32(start.scale)
        window.passes -= 1
        raise
    window.note_loss(loss)
    window.retries += tried
    # The step that follows an overflow backs off once. Gradients that are NaN at any scale would otherwise bring it to
    # the floor with every batch.
    rule.state = start if overflowed else state
    window.start = rule.catch_up()
    stash.call_hooks()


def _overflowed(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    dense = [numbers_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return ~torch.isfinite(largest(dense, device)).all()


def _is_finite(loss: Tensor, device: torch.device) -> Tensor:
    held = loss.detach()
    return torch.isfinite(held.to_local() if hasattr(held, "to_local") else held).all().to(device)  # type: ignore[attr-defined]


def check_backward(retries: int, kwargs: dict[str, Any]) -> None:
    """Raises unless `retries` is a count, and nothing keeps the backward pass from being run again."""
    check_retries(retries)
    if retries and kwargs.get("create_graph"):
        raise ValueError(
            "`retries` may run the backward pass more than once, which `create_graph=True` cannot differentiate. "
            "Pass one of the two; for a gradient penalty use `LossScaler.grad(loss, inputs, create_graph=True)`."
        )


def check_retriable(modules: Sequence[nn.Module], ranks: int) -> None:
    """Raises if the modules are not known, or gradients may be sent to other ranks during the backward pass."""
    if not modules:
        raise RuntimeError(
            "`retries` must know every parameter whose gradient shares the scale, to clear it before the next attempt. "
            "Build the scaler as `LossScaler(model)`."
        )
    for module in modules:
        if sender := synchronizing(module):
            raise RuntimeError(
                f"`retries` cannot run the backward pass of {type(sender).__name__} again: it sends its gradients to "
                f"the other ranks while it runs, once per forward pass. {_INSTEAD[_is_ddp(sender)]}"
            )
    if ranks > 1 and not all(map(_is_ddp, modules)):
        # DDP leaves no trace in the module that it wraps.
        raise RuntimeError(
            f"`retries` cannot run a backward pass again that may send gradients to other ranks. Received: {ranks} "
            "ranks, and a module that DDP or FSDP may have been built around. Build the scaler with the wrapper, as "
            'LossScaler(DDP(model)), and call `backward` inside `no_sync()`; or with `group="alone"`, where ranks '
            "train separate models."
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
