"""Stage two, agree: the measurement, reduced over all ranks that share the scale."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.engine.measurement import Measurement
from gradscale.kernels.torch import single, single_norm
from gradscale.policies.contract import Seen
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Agreement:
    """The ranks that decide together.

    Attributes:
        group: a process group; None means every rank once `torch.distributed` is initialized, else this process alone.
    """

    group: "dist.ProcessGroup | None" = None

    @property
    def ranks(self) -> int:
        """How many ranks decide together."""
        # Looked up at every step: `torch.distributed` may be initialized after the scaler is built.
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.group)

    @np.errstate(all="ignore")
    def agree(self, plan: StepPlan, measurement: Measurement, rule: Rule) -> tuple[Measurement, Seen]:
        """Returns the sizes of whole gradients, and the facts of the step, the same on every rank, in leaves of `rule`.

        Gradients that overflowed outside of the step count as its own, and then a loss made from them is not the cause.
        Does not synchronize with the device.
        """
        # Only where every rank has read sizes: a finite check reads them on the ranks that overflowed alone, and an
        # all-reduce that some ranks do not join never returns. `values` is `grads` itself if all are plain and dense.
        if plan.sizes and plan.gradients.values is not plan.gradients.grads:
            measurement = joined(measurement, plan.gradients.grads)
        window, xp = plan.window, rule.xp
        overflowed = rule.leaf(window.overflowed)
        loss_finite = xp.logical_or(rule.leaf(window.loss_finite), overflowed)
        seen = rule.measurement(measurement).seen(rule.leaf(plan.divisor), loss_finite, xp, overflowed)
        if plan.edited:
            # From before the edits inside `unscaled`: a policy that saw clipped gradients would raise the scale until
            # the backward pass overflows.
            amax = xp.where(seen.finite, rule.leaf(window.unscaled.amax), np.inf)
            seen = replace(seen, amax=amax, upper_share=rule.leaf(window.unscaled.share))
        return measurement, seen if self.ranks == 1 else rule.leaves(self.over_ranks(rule.tensors(seen)))

    def over_ranks(self, seen: Seen) -> Seen:
        """Returns `seen` as the worst that any rank saw: one small MAX all-reduce, or nothing for a single rank.

        Each rank's own loss may be finite while the averaged gradients have another rank's NaN. Without this, one rank
        would keep its scale because of the loss and another would back off, and their scales would differ.
        """
        if self.ranks == 1:
            return seen
        flags = [(~seen.finite).float(), (~seen.loss_finite).float()]
        # MAX may drop a NaN. `posinf`, because `nan_to_num` turns inf into the largest float32 by default.
        sizes = [size.nan_to_num(nan=torch.inf, posinf=torch.inf) for size in (seen.amax, seen.norm, seen.upper_share)]
        packed = torch.stack(flags + sizes)
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self.group)
        bad, bad_loss, amax, norm, share = packed.unbind()
        return Seen(finite=bad == 0, loss_finite=bad_loss == 0, amax=amax, norm=norm, upper_share=share)

    def any_rank(self, flags: Tensor) -> list[bool]:
        """Returns which of `flags`, a vector of bools, are set on any rank. Synchronizes with the device once."""
        if self.ranks == 1:
            return flags.tolist()  # type: ignore[return-value]
        packed = flags.float()
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self.group)
        return (packed != 0).tolist()  # type: ignore[return-value]


@torch.no_grad()
def joined(measurement: Measurement, grads: Sequence[Tensor]) -> Measurement:
    """Returns the sizes of whole gradients from those of the shards that this rank holds, as FSDP2 keeps them.

    One small all-reduce for each way in which gradients are sharded, and one more if both norms and the largest
    magnitude were read. Every rank must call it. Does not synchronize with the device.
    """
    sharded = _sharded_over(grads)
    if not sharded:
        return measurement
    has_norm, local, amax = measurement.norm is not None, cast(Tensor, measurement.sizes), measurement.amax
    # Norms of shards add up as squares. SUM carries inf and NaN, MAX does not carry NaN.
    sizes = local.square() if has_norm else _largest_of(local)
    for group, positions in sharded:
        part = sizes[positions]  # a copy, which is reduced and written back
        dist.all_reduce(part, dist.ReduceOp.SUM if has_norm else dist.ReduceOp.MAX, group=group)
        sizes[positions] = part
        if has_norm and amax is not None:
            amax = _largest_of(amax)
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    if not has_norm:
        total = sizes.amax()
        return measurement._replace(sizes=sizes, total=total, amax=single(total))
    sizes = sizes.sqrt()
    total = torch.linalg.vector_norm(sizes)
    return measurement._replace(sizes=sizes, total=total, norm=single_norm(total), amax=amax)


def _largest_of(sizes: Tensor) -> Tensor:
    """Returns a copy with NaN as inf, since MAX may drop a NaN."""
    return sizes.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _sharded_over(grads: Sequence[Tensor]) -> list[tuple[Any, list[int]]]:
    """Returns the groups of ranks that share gradients among them, each with the positions of these gradients."""
    found: dict[tuple[Any, int], list[int]] = {}
    for position, grad in enumerate(grads):
        for dim, placement in enumerate(getattr(grad, "placements", ())):
            if placement.is_shard():
                found.setdefault((grad.device_mesh, dim), []).append(position)  # type: ignore[attr-defined]
    return [(mesh.get_group(dim), positions) for (mesh, dim), positions in found.items()]
