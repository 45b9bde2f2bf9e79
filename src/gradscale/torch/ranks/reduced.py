"""Gradients that DDP has reduced: the same on every rank, so that they tell all ranks what one of them has seen."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradscale.torch.accumulation.leaves import fills
from gradscale.torch.accumulation.window import after_backward
from gradscale.torch.step.apply import folds
from gradscale.torch.step.gradients import numbers_of, parameters_of
from gradscale.torch.step.host_copy import host_value, in_host_memory, moved

Optimizer = torch.optim.Optimizer
DDP = nn.parallel.DistributedDataParallel


class Reduced:
    """Whether all gradients of a step are reduced by DDP over the ranks that decide together.

    An inf or a NaN that a backward pass makes on one rank is then in the gradients of every rank.

    Attributes:
        all_wrapped: whether every module is wrapped in DDP.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        inner = [module._modules.get("_orig_mod") or module for module in modules]
        self._wrappers = [module for module in inner if isinstance(module, DDP)]
        self.all_wrapped = bool(inner) and len(self._wrappers) == len(inner)
        self._managed: tuple[Any, bool] | None = None

    def during_backward(self) -> bool:
        """Returns whether a backward pass that runs now ends with reduced gradients."""
        return self.all_wrapped and all(wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    def mark(self, factor: Tensor) -> None:
        """Multiplies gradients that the running backward pass adds to by `factor`, 1 or NaN, before DDP reduces them.

        A factor of the loss is not enough: the loss of a batch without targets is NaN, and its gradients are zeros,
        whatever it is multiplied by.
        """
        known = host_value(factor)
        if known == 1.0:
            return
        # All, as an optimizer may hold any of them. On a device, where NaN is not known, one of each module: a hook for
        # each parameter would be called at every step.
        count = 1 if known is None else None
        for wrapper in self._wrappers:
            filled = (each for each in wrapper.parameters() if _is_filled(each))
            for parameter in islice(filled, count):
                _multiply_next(parameter, factor)

    @property
    def joining(self) -> bool:
        """Whether the ranks may run out of batches one by one, inside `join`."""
        return any(wrapper._join_config.enable for wrapper in self._wrappers)

    def all_finite(self) -> bool:
        """Returns whether all gradients are finite. Synchronizes with the device; only for where something failed."""
        grads = [each.grad for wrapper in self._wrappers for each in wrapper.parameters() if each.grad is not None]
        return all(bool(torch.isfinite(numbers_of(grad)).all()) for grad in grads)

    def holds_for(self, optimizers: Sequence[Optimizer], device: torch.device, group: Any) -> bool:
        """Returns whether the ranks of `group` may decide by what the gradients tell.

        On an accelerator not if a fused kernel gates the update, where the host would have to wait for the gradients.
        """
        if not self.all_wrapped or self.joining:
            return False
        if not in_host_memory(device) and any(map(folds, optimizers)):
            return False
        # Once, unless parameters are added: a look at each would cost as much as a step's other bookkeeping.
        count = sum(len(each["params"]) for optimizer in optimizers for each in optimizer.param_groups)
        known = tuple(map(id, optimizers)), count
        if self._managed is None or self._managed[0] != known:
            self._managed = known, self._manages(optimizers, group)
        return self._managed[1]

    def _manages(self, optimizers: Sequence[Optimizer], group: Any) -> bool:
        """Returns whether DDP reduces the gradient of every parameter of `optimizers`, over the ranks of `group`."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if any(
            wrapper.parameters_to_ignore
            or dist.get_process_group_ranks(wrapper.process_group) != ranks
            or not all(_reduces(hook) for hook, _ in wrapper._comm_hooks)
            for wrapper in self._wrappers
        ):
            return False
        managed = {id(parameter) for wrapper in self._wrappers for parameter in wrapper.parameters()}
        return all(id(parameter) in managed for parameter in parameters_of(optimizers))


def _reduces(hook: Any) -> bool:
    """Returns whether a hook of DDP is known to leave the same gradients on all ranks, and NaN where one has it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


def _is_filled(parameter: Tensor) -> bool:
    """Returns whether the running backward pass adds to the gradient of `parameter`."""
    return parameter.requires_grad and fills(get_gradient_edge(parameter).node)


def _multiply_next(parameter: Tensor, factor: Tensor) -> None:
    """Multiplies one element of the gradient of `parameter` by `factor` when the running backward pass has added to it.

    One NaN is enough, and costs no pass over the gradient. DDP reads it after this hook.
    """

    @torch.no_grad()
    def multiply(held: Tensor) -> None:
        handle.remove()
        grad = cast(Tensor, held.grad)
        numbers = grad._values() if grad.is_sparse else grad
        numbers[(slice(1),) * numbers.dim()].mul_(moved(factor, numbers.device))

    handle = parameter.register_post_accumulate_grad_hook(multiply)
    after_backward(handle.remove)  # if the pass has added to it before, the next one must not be marked
