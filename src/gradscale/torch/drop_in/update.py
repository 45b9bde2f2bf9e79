"""The scale of `GradScaler`, moved in place after a step: by torch's own kernel, or by any policy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradscale.policies.contract import Policy, Seen
from gradscale.torch.drop_in.settings import Bounds
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.measure import Measured, measure, share_above

LARGEST_TRACKER = 2**31 - 1


def move_by_kernel(
    scale: Tensor,
    tracker: Tensor,
    overflow: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    bounds: Bounds,
) -> None:
    """Moves `scale` and `tracker` as `Dynamic` with hysteresis 1 does, in a few tiny kernels. Nothing waits.

    torch's kernel grows the scale when the tracker meets the interval exactly, so one that is past it is brought back
    to the step before; and it would back off to zero.
    """
    tracker.clamp_(max=min(growth_interval - 1, LARGEST_TRACKER))
    numbers = (growth_factor, backoff_factor, growth_interval)
    torch._amp_update_scale_(scale, tracker, overflow.float(), *numbers)  # type: ignore[attr-defined]
    scale.clamp_(bounds.min_scale, bounds.max_scale)


def move_by_policy(rule: Rule, scale: Tensor, tracker: Tensor, seen: Seen, bounds: Bounds) -> None:
    """Moves `rule`, and with it `scale` and `tracker`. Does not wait for the device."""
    # These two count: others may have set them since the state was made.
    present = replace(rule.state, scale=rule.leaf(scale.clone()), clean_steps=rule.leaf(tracker.clone()))
    rule.state = rule.after(present, rule.leaves(seen))
    scale.copy_(rule.scale).clamp_(bounds.min_scale, bounds.max_scale)
    tracker.copy_(rule.tensor(rule.state.clean_steps))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large one optimizer's gradients were, in scaled units.

    Attributes:
        amax: largest magnitude.
        upper_share: share of the elements above the policy's edge; zero where it has none.
        elements: how many elements there are.
    """

    amax: Tensor
    upper_share: Tensor
    elements: int


def sizes_for(policy: Policy, gradients: Sequence[Tensor], scale: Tensor, measured: Measured | None) -> Sizes:
    """Returns what `policy` needs to know of `gradients`, whose largest magnitudes may have been `measured` already."""
    read = measure(gradients, scale.device, norm=False) if measured is None else measured
    share = torch.zeros_like(scale)
    if "upper_share" in policy.needs:
        edge = torch.full_like(scale, policy.edge_magnitude)  # type: ignore[attr-defined]
        share = share_above(gradients, edge, scale.device)
    return Sizes(read.amax, share, sum(grad.numel() for grad in gradients))


def seen_in(sizes: Sequence[Sizes], overflow: Tensor, scale: Tensor) -> Seen:
    """Returns what the policy is shown of a step: all optimizers together, in true units.

    torch's scaler does not look at the loss, so every overflow is put down to the scale.
    """
    zero = torch.zeros_like(scale)
    amax, share = zero, zero
    if sizes:
        amax = torch.stack([each.amax for each in sizes]).amax() / scale
        above = torch.stack([each.upper_share * each.elements for each in sizes]).sum()
        share = above / max(1, sum(each.elements for each in sizes))
    return Seen(
        finite=~overflow,
        loss_finite=torch.ones_like(overflow),
        amax=torch.where(overflow, zero, amax),
        norm=zero,
        upper_share=share,
    )
