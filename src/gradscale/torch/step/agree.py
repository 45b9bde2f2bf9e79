"""Room two, agree: makes what was seen the same on every rank that shares the scale."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.policies.contract import Seen


@dataclass(frozen=True, slots=True)
class Agreement:
    """The ranks that decide together.

    Attributes:
        group: a process group; None means every rank once `torch.distributed` is initialised, else this process alone.
    """

    group: "dist.ProcessGroup | None" = None

    @property
    def ranks(self) -> int:
        """How many ranks decide together."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.group)

    def over_ranks(self, seen: Seen) -> Seen:
        """Returns `seen` as the worst that any rank saw: one small MAX all-reduce, or nothing for a single rank.

        Each rank's own loss may be fine while the averaged gradients carry another rank's NaN. Without this, one rank
        would blame the loss and another the scale, and their scales would part.
        """
        if self.ranks == 1:
            return seen
        share = torch.as_tensor(seen.upper_share, device=seen.finite.device)
        sizes = [_nan_as_inf(size) for size in (seen.amax, seen.norm, share)]
        packed = torch.stack([(~seen.finite).float(), (~seen.loss_finite).float(), *sizes])
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self.group)
        bad, bad_loss, amax, norm, share = packed.unbind()
        return Seen(finite=bad == 0, loss_finite=bad_loss == 0, amax=amax, norm=norm, upper_share=share)

    def any_rank(self, flag: Tensor) -> bool:
        """Returns whether `flag`, a 0-d bool, is set on any rank. Waits for the device."""
        if self.ranks == 1:
            return bool(flag)
        packed = flag.float()
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self.group)
        return bool(packed.item())


def _nan_as_inf(value: Tensor) -> Tensor:
    """Returns `value` with NaN as inf: MAX does not carry NaN reliably."""
    return torch.where(torch.isnan(value), torch.inf, value)
