"""The scale of `GradScaler`, updated in place after a step: by torch's own kernel, or by any policy."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.measurement import Measurement, reads_amax, with_amax
from gradscale.engine.plan import edge_of
from gradscale.kernels.torch import share_above
from gradscale.policies.arithmetic import larger
from gradscale.policies.contract import Policy, ScaleState, Seen, advanced
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import CheckOnly, Static
from gradscale.torch.drop_in.settings import Bounds
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.host_copy import host_value
from gradscale.torch.step.measure import measure_sizes

LARGEST_TRACKER = 2**31 - 1  # the tracker is an int32

Sizes = tuple[Measurement, Tensor | int]
"""What a policy needs of one optimizer's scaled gradients, and their number of elements."""


def by_kernel(
    scale: Tensor,
    tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    bounds: Bounds,
) -> None:
    """Updates `scale` and `tracker` as `Dynamic` with hysteresis 1 does. Does not synchronize with the device.

    `found_inf` is a float32 that is 0 unless a gradient was not finite.
    """
    # The kernel grows the scale only when the tracker equals the interval: one that is past it, after the interval was
    # lowered, would never meet it again.
    _bound(tracker, -LARGEST_TRACKER, min(growth_interval - 1, LARGEST_TRACKER))
    numbers = (growth_factor, backoff_factor, growth_interval)
    torch._amp_update_scale_(scale, tracker, found_inf, *numbers)  # type: ignore[attr-defined]
    # The kernel keeps the old scale where a larger one is not finite, and backs off down to 0.
    _bound(scale, bounds.min_scale, bounds.max_scale)


def _bound(value: Tensor, low: float, high: float) -> None:
    """Clamps `value` in place. In host memory it is read first: that takes a fraction of the time."""
    known = host_value(value)
    if known is None or not low <= known <= high:
        value.clamp_(low, high)


def by_policy(
    rule: Rule,
    scale: Tensor,
    tracker: Tensor,
    step: tuple[Sequence[Sizes], Tensor, Tensor, Tensor],
    before: tuple[Any, Any],
    bounds: Bounds,
) -> None:
    """Updates `rule`, and with it `scale` and `tracker`. Does not synchronize with the device.

    `step` has the arguments of `seen_by`, and `before` has the two tensors as `kept`: a state is never changed.
    """
    start = present(rule, *before)
    after = _advanced(rule, start, *step)
    # In host memory, where it can be compared, what stays the same is not written: mostly the scale.
    if not rule.hosted or after.scale != start.scale:
        rule.write(after.scale, scale)
    # Also where it stays the same: other code may have set one that is out of bounds.
    _bound(scale, bounds.min_scale, bounds.max_scale)
    if not rule.hosted or after.clean_steps != start.clean_steps:
        rule.write(after.clean_steps, tracker)


# numpy warns where a scalar overflows or is divided by 0, and a device does not: inf and NaN are facts here.
@np.errstate(all="ignore")
def _advanced(rule: Rule, state: ScaleState, *step: Any) -> ScaleState:
    """Advances `rule` from a state, and returns the state that follows. `step` has the arguments of `seen_by`."""
    seen, rule.amax_ratio = seen_by(rule, *step)
    rule.state = advanced(rule.policy, state, seen, rule.xp)
    rule.steps += 1
    return rule.state


def present(rule: Rule, scale: Any, tracker: Any) -> ScaleState:
    """Returns the state of `rule` with torch's two numbers, as `kept`: other code may have set them since."""
    state = rule.state
    # Compared only in host memory: on a device that would synchronize.
    if rule.hosted and scale == state.scale and tracker == state.clean_steps:
        return state
    return replace(state, scale=rule.leaf_of(scale, torch.float32), clean_steps=rule.leaf_of(tracker, torch.int32))


def lowest_factor(rule: Rule | None, backoff_factor: float) -> float:
    """Returns the least that one update may multiply the scale by; 0 where the policy has no such bound."""
    if rule is None or isinstance(rule.policy, Dynamic):
        return backoff_factor
    return 1.0 if isinstance(rule.policy, Static | CheckOnly) else 0.0


def sizing_policy(rule: Rule | None) -> Policy | None:
    """Returns the policy if it needs the sizes of the gradients, else None."""
    return None if rule is None or rule.policy.needs <= {"finite", "loss_finite"} else rule.policy


def reads_amax_beside_norm(rule: Rule | None, *, merges: bool) -> bool:
    """Returns whether this step reads the largest magnitude where it reads a norm; else it is estimated from that.

    `merges` is whether the next `update` merges with the last one: both are of the same step.
    """
    policy = sizing_policy(rule)
    if rule is None or policy is None:
        return False
    return edge_of(policy) is not None or reads_amax(rule.steps - merges)


def measure_for(policy: Policy, gradients: Sequence[Tensor], scale: Tensor, known: Measurement | None = None) -> Sizes:
    """Returns what `policy` needs of one optimizer's scaled gradients, and their number of elements.

    Part of it may be `known` already: the largest magnitude, or a norm from which it is estimated. Elements are 0 for a
    policy that needs no share of them.
    """
    edge = edge_of(policy)
    elements = 0 if edge is None else sum([grad.numel() for grad in gradients])
    if known is None or known.amax is known.norm is None:
        return measure_sizes(gradients, scale.device, edge=edge, each=False), elements
    if edge is None:
        return known, elements
    return known._replace(upper_share=share_above(gradients, torch.full_like(scale, edge), scale.device)), elements


def seen_by(
    rule: Rule, measured: Sequence[Sizes], found_inf: Tensor, scale: Tensor, loss_finite: Tensor
) -> tuple[Seen, Any]:
    """Returns what the policy sees of a step, all optimizers together and unscaled, and the ratio of amax to norm.

    Both are in leaves of `rule`; the ratio is that for later steps.

    Args:
        rule: the rule.
        measured: what `measure_for` returned for each optimizer.
        found_inf: 0 unless a gradient was not finite.
        scale: the scale that made the gradients.
        loss_finite: whether every loss was finite, as far as all ranks know.
    """
    default, xp = rule.default, rule.xp
    # Most often of one optimizer: nothing is to be merged.
    together = measured[0][0] if len(measured) == 1 else _merged(measured, scale)
    amax, norm = together.amax, together.norm
    sizes = Measurement(
        None,
        default.norm,  # not used: whether all are finite is known
        amax=default.amax if amax is None else rule.leaf(amax),
        norm=None if norm is None else rule.leaf(norm),
        upper_share=default.upper_share if together.upper_share is None else rule.leaf(together.upper_share),
    )
    finite = xp.logical_not(rule.leaf(found_inf))
    seen = sizes.seen_with(finite, rule.leaf(scale), rule.leaf(loss_finite), xp)
    if norm is None:
        return seen, rule.amax_ratio
    without_amax = sum([found.amax is None for found, _ in measured])
    if not without_amax and any([found.norm is None for found, _ in measured]):
        return seen, rule.amax_ratio
    known, ratio = with_amax(seen, rule.amax_ratio, xp, measured=not without_amax)
    if 0 < without_amax < len(measured):
        known = replace(known, amax=larger(known.amax, seen.amax, xp))
    return known, ratio


def _merged(measured: Sequence[Sizes], scale: Tensor) -> Measurement:
    """Returns the sizes of several optimizers' gradients together, or of none."""
    sizes = [found for found, _ in measured]
    amaxes = [found.amax for found in sizes if found.amax is not None]
    norms = [found.norm for found in sizes if found.norm is not None]
    counted = [found.upper_share * size for found, size in measured if found.upper_share is not None]
    # Numbers of this rank, or tensors that hold those of all ranks.
    elements = torch.zeros_like(scale) + sum(size for _, size in measured)
    return Measurement(
        None,
        scale,  # not used
        amax=reduce(torch.maximum, amaxes) if amaxes else None,
        norm=torch.linalg.vector_norm(torch.stack(norms)) if norms else None,
        upper_share=torch.stack(counted).sum() / elements.clamp(min=1) if counted else None,
    )
