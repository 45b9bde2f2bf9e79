"""Gradients that DDP has reduced: the same on every rank, so that they tell all ranks what one of them has seen."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradscale.torch.step.apply import folds
from gradscale.torch.step.gradients import numbers_of, parameters_of
from gradscale.torch.step.host_copy import in_host_memory

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
            wrapper.parameters_to_ignore or dist.get_process_group_ranks(wrapper.process_group) != ranks
            for wrapper in self._wrappers
        ):
            return False
        managed = {id(parameter) for wrapper in self._wrappers for parameter in wrapper.parameters()}
        return all(id(parameter) in managed for parameter in parameters_of(optimizers))
