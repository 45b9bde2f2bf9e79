"""Running the backward pass again at a lower scale when it overflows, so that no batch is lost."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.torch.measure import measure
from gradscale.torch.rule import Rule
from gradscale.torch.window import Window


class Stash:
    """Gradients of earlier micro-batches, put aside while one backward pass is tried and tried again."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._earlier = [parameter.grad for parameter in parameters]
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients of the pass under trial."""
        for parameter in self._parameters:
            parameter.grad = None

    def fresh(self) -> list[Tensor]:
        """Returns the gradients that the pass under trial has made, the values of sparse ones."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return [grad.coalesce()._values() if grad.is_sparse else grad for grad in grads]

    @torch.no_grad()
    def rescale(self, ratio: Tensor) -> None:
        """Multiplies the earlier gradients by the ratio of two scales: exact where that is a power of two."""
        for earlier in self._earlier:
            if earlier is not None:
                (earlier._values() if earlier.is_sparse else earlier).mul_(ratio.to(earlier.device))

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the gradients of the pass to the earlier ones."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def restore(self) -> None:
        """Puts the earlier gradients back, as if the pass had never been tried."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier


def backward_with_retries(
    loss: Tensor, window: Window, rule: Rule, parameters: Sequence[Tensor], retries: int, kwargs: dict[str, Any]
) -> None:
    """Runs the backward pass of `loss`, again at lower scales while it overflows, at most `retries` times more.

    Waits for the device after every attempt. If the last attempt overflows too, the scale is put back where it was, so
    that the step that follows backs off once: gradients that are NaN at any scale would otherwise drain it. If the
    backward pass raises, gradients and scale are as they were before.
    """
    stash, before = Stash(parameters), rule.state
    keep_graph = kwargs.pop("retain_graph", False)
    finite_loss = bool(torch.isfinite(loss.detach()).all())
    try:
        for tried in range(retries + 1):
            again = finite_loss and tried < retries
            window.scaled(loss).backward(retain_graph=keep_graph or again, **kwargs)
            if _all_finite(stash.fresh()) or not again or not _lowered(rule, window, stash):
                break
            window.retries += 1
        if not _all_finite(stash.fresh()):
            rule.state, window.scale = before, before.scale
        stash.merge()
    except BaseException:
        stash.restore()
        rule.state, window.scale = before, before.scale
        raise


def _lowered(rule: Rule, window: Window, stash: Stash) -> bool:
    """Lowers the scale and everything made with it; returns False, with nothing changed, where it cannot go lower."""
    before = rule.state
    ratio = rule.lower()
    if float(ratio) >= 1:
        rule.state = before
        return False
    window.scale = rule.state.scale
    stash.clear()
    stash.rescale(ratio)
    return True


def _all_finite(gradients: Sequence[Tensor]) -> bool:
    if not gradients:
        return True
    return bool(torch.isfinite(measure(gradients, gradients[0].device, norm=False).total))


def retriable_parameters(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Returns the parameters whose gradients share the scale, or says why a backward pass cannot be run again.

    Raises:
        RuntimeError: the modules are not known, or one of them synchronises its gradients during the backward pass.
    """
    if not modules:
        raise RuntimeError(
            "`retries` must know every parameter whose gradient shares the scale, to bring all of them to the new one. "
            "Build the scaler as `LossScaler(model)`."
        )
    for module in modules:
        if _synchronises(module):
            raise RuntimeError(
                f"`retries` cannot run the backward pass of {type(module).__name__} again: it sends its gradients to the "
                "other ranks while it runs, once per forward pass. Call `backward(loss)` without `retries`, or run it "
                "inside `model.no_sync()` and reduce the gradients yourself."
            )
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]


def _synchronises(module: nn.Module) -> bool:
    if not dist.is_available():
        return False
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.require_backward_grad_sync
    return any(
        "FullyShardedDataParallel" in kind.__name__ or "FSDPModule" in kind.__name__ for kind in type(module).__mro__
    )
