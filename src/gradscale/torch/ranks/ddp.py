"""DDP: gradients that it has reduced, which are the same on every rank, and ranks that run out of batches in `Join`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from gradscale.torch.gradients import parameters_below, parameters_of

Optimizer = torch.optim.Optimizer
DDP = nn.parallel.DistributedDataParallel


class Reduced:
    """Whether all gradients of a step are reduced by DDP over the ranks that decide together.

    An inf or a NaN that a backward pass makes on one rank is then in the gradients of every rank.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        inner = [module._modules.get("_orig_mod") or module for module in modules]
        self._wrappers = [module for module in inner if isinstance(module, DDP)]
        self._all_wrapped = bool(inner) and len(self._wrappers) == len(inner)

    @property
    def joining(self) -> bool:
        """Whether the ranks may run out of batches one by one, inside `join`."""
        return any(wrapper._join_config.enable for wrapper in self._wrappers)

    def holds_for(self, optimizers: Sequence[Optimizer], group: Any) -> bool:
        """Returns whether the ranks of `group` may decide by the gradients of `optimizers` alone."""
        if not self._all_wrapped or self.joining:
            return False
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

        # Those known to leave the same gradients on all ranks, and NaN where one has it.
        known = hooks.allreduce_hook, hooks.fp16_compress_hook, hooks.bf16_compress_hook
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if any(
            wrapper.parameters_to_ignore
            or dist.get_process_group_ranks(wrapper.process_group) != ranks
            or not all(hook in known for hook, _ in wrapper._comm_hooks)
            for wrapper in self._wrappers
        ):
            return False
        managed = set(map(id, parameters_below(self._wrappers)))
        return all(id(parameter) in managed for parameter in parameters_of(optimizers))


class FollowingRank(JoinHook):
    """Follows the steps of other ranks on one that has no batches left, so that its scale stays the same as theirs."""

    def __init__(self, follow: Callable[[], None]) -> None:
        self._follow = follow

    def main_hook(self) -> None:
        """Takes part in one step of the others."""
        self._follow()


def check_joins(joining: bool, config: Any) -> None:
    """Raises if the model is inside of a `Join` and the scaler is not, or comes first.

    `config` is what `Join` has set on the scaler; None if it never has.
    """
    if joining and not (config is not None and config.enable):
        raise RuntimeError(
            "Inside `model.join()` ranks run out of batches one by one, and those that have none left must follow the "
            "scale. Received: a `Join` without the scaler. Use `with Join([model, scaler]):` from "
            "`torch.distributed.algorithms.join`."
        )
    if joining and config.is_first_joinable:
        raise RuntimeError(
            "`Join` runs what its members send in their order, and the model sends first. Received: the scaler as the "
            "first. Use `with Join([model, scaler]):`."
        )
