"""An optimizer's gradients for `GradScaler`: their finite check, and what is noted of them until `update`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.engine.measurement import Measurement
from gradscale.kernels.torch import devices_of
from gradscale.policies.contract import Policy
from gradscale.torch.drop_in.ranks import ScaledNorm
from gradscale.torch.drop_in.scale_bound import ScaleBound
from gradscale.torch.drop_in.update import measure_for
from gradscale.torch.step.gradients import (
    Gradients,
    collect,
    first_of_each,
    hold_their_numbers,
    parameters_of,
    values_of,
)
from gradscale.torch.step.host_copy import host_value, moved
from gradscale.torch.step.measure import check, measure_sizes
from gradscale.torch.step.numbers import Numbers, unwarned
from gradscale.torch.step.result import Traces

Optimizer = torch.optim.Optimizer


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the dense tensors that hold the numbers of the optimizer's gradients, each gradient's once.

    Of a distributed one, the shard that this rank holds. One that ranks hold in summands is summed first.
    """
    return gradients_and_sharing(optimizer)[0]


def gradients_and_sharing(optimizer: Optimizer) -> tuple[list[Tensor], bool]:
    """Returns the same, and whether one of the gradients is held twice: by two parameters, or by one listed twice."""
    groups = optimizer.param_groups
    values = grads = [grad for group in groups for each in group["params"] if (grad := each.grad) is not None]
    if not hold_their_numbers(grads):
        parameters = list(parameters_of([optimizer]))
        values = [_values(each, grad) for each in parameters if (grad := each.grad) is not None]
        # Read again: coalescing and summing replace it.
        grads = [grad for each in parameters if (grad := each.grad) is not None]
    first = first_of_each(grads)
    return (values, False) if len(first) == len(values) else ([values[index] for index in first], True)


def _values(parameter: Tensor, grad: Tensor) -> Tensor:
    """Returns the dense tensor that holds the numbers. Sparse FP16 ones are coalesced first, as in torch."""
    # A sum may overflow. Others are not: coalescing sorts the entries, and sums in float32 rarely overflow.
    if grad.layout is torch.sparse_coo and grad.dtype is not torch.float16:
        return grad._values()
    return grad if type(grad) is Tensor and grad.layout is torch.strided else values_of(parameter, grad)


def check_scaled(
    gradients: Sequence[Tensor],
    own: Tensor | None,
    state: dict[str, Any],
    scale: Tensor,
    bound: ScaleBound,
    policy: Policy | None,
) -> dict[torch.device, Tensor]:
    """Returns, per device, whether the gradients are finite now and would be once divided by the scale.

    Notes how large they are, if that was read. Reads the gradients once and changes none. Does not synchronize with the
    device.

    Args:
        gradients: those of one optimizer.
        own: what the user has set for its kernel to divide by too, its `grad_scale`; None if nothing.
        state: where it is noted.
        scale: the scale that made the gradients.
        bound: the bound of that scale.
        policy: the policy if it needs the sizes of the gradients, else None.
    """
    divisor = scale if own is None else scale * own
    grows = own is not None or bound.may_be_below_one(scale)
    overflow, measured = check(gradients, divisor, grows=grows, amax=policy is not None)
    if policy is not None:
        state["sizes"] = measure_for(policy, gradients, scale, measured)
    state["measured"], state["count"] = measured, len(gradients)
    return {device: overflow.to(device, torch.float32) for device in devices_of(gradients)}


def check_only(gradients: Sequence[Tensor], like: Tensor) -> dict[torch.device, Tensor]:
    """Returns, per device, whether a gradient is not finite. One read, no write. Does not synchronize.

    `like` is a float32 on the device of the scale.
    """
    overflow, _ = check(gradients, torch.ones_like(like), grows=False)
    return {device: overflow.to(device, torch.float32) for device in devices_of(gradients)}


def check_norm(
    gradients: Gradients,
    found: dict[str, Any],
    divisor: Tensor,
    *,
    grows: bool,
    policy: Policy | None,
    amax: bool,
    scale: Tensor,
) -> dict[torch.device, Tensor]:
    """Returns the same as `check_scaled`, and notes the unscaled norm in `found`.

    Reads the gradients once, and once more with `amax`. A norm that is not finite counts as an
    overflow: nothing can be clipped by it. Does not synchronize with the device.

    Args:
        gradients: those of one optimizer.
        found: where it is noted.
        divisor: what the gradients are to be divided by: the scale that made them, or 1 if they are unscaled.
        grows: whether it may be below 1, so that a finite gradient may not be finite once divided.
        policy: the policy if it needs the sizes of the gradients, else None.
        amax: whether it needs the largest magnitude itself, and not an estimate of it.
        scale: the scale that made them.
    """
    values = gradients.values
    measured = measure_sizes(values, divisor.device, norm=True, amax=amax, half=grows, each=False)
    if policy is not None:
        found["sizes"] = measure_for(policy, values, scale, measured)
    overflow, norm = _unscaled_norm(measured, divisor)
    found |= {"measured": measured, "norm": ScaledNorm(gradients, measured, divisor), "grad_norm": norm}
    return {device: moved(overflow, device) for device in devices_of(values)}


def _unscaled_norm(measured: Measurement, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns whether a gradient is not finite, 0 or 1, and the norm of all, unscaled: inf if one is not finite."""
    known = host_value(divisor)
    return unwarned(_divided_norm, measured, divisor, safe=known is not None and 1 <= known < np.inf)


def _divided_norm(measured: Measurement, divisor: Tensor) -> tuple[Tensor, Tensor]:
    numbers = Numbers(divisor.device)
    leaves, scale, xp = numbers.measurement(measured), numbers.leaf(divisor), numbers.xp
    finite = leaves.finite(scale, xp)
    overflow = xp.where(finite, scale * 0, 1.0)
    return numbers.tensor(overflow), numbers.tensor(xp.where(finite, leaves.norm * (1.0 / scale), np.inf))


def note_norm(state: dict[str, Any], found: dict[str, Any], flags: dict[torch.device, Tensor]) -> None:
    """Notes in `state` what `check_norm` has `found` and all ranks have agreed on. Earlier flags stay set."""
    before = state["found_inf_per_device"]
    state["found_inf_per_device"] = {
        device: torch.maximum(flag, before[device]) if device in before else flag for device, flag in flags.items()
    }
    overflowed = {host_value(flag) for flag in state["found_inf_per_device"].values()}
    if overflowed == {0.0}:
        # All are finite, and nobody will ask which of them are not.
        del found["measured"]
    # What was noted before the gradients were unscaled, and perhaps edited, stays.
    state |= found | state


def still_finite(
    optimizer: Optimizer, flags: dict[torch.device, Tensor], scale: Tensor, bound: ScaleBound
) -> dict[torch.device, Tensor]:
    """Returns `flags`, those of the kernel that divided the gradients, set also where they are not finite any more.

    One read of the gradients while the scale is below 1. Does not synchronize with the device.
    """
    if not flags or not bound.may_be_below_one(scale):
        return flags
    # torch's kernel checks the values before it multiplies them: finite ones may be inf after a division by a scale
    # below 1.
    overflow, _ = check(gradients_of(optimizer), torch.ones_like(scale), grows=True)
    return {device: torch.maximum(flag, overflow.to(flag)) for device, flag in flags.items()}


def note_unscaled(
    optimizer: Optimizer, state: dict[str, Any], flags: dict[torch.device, Tensor], device: torch.device
) -> None:
    """Notes in `state` that the gradients are divided, and whether they were finite and still are.

    One read of the gradients where the host knows of an overflow. Does not synchronize with the device.
    """
    state["found_inf_per_device"] = flags
    state["stage"] = OptState.UNSCALED
    state["groups"] = len(optimizer.param_groups)
    if any(map(host_value, flags.values())):
        # Measured now, before the user clips: `clip_grad_norm_` with a norm of NaN makes every element NaN, and every
        # parameter would count as non-finite.
        state["measured"] = measure_sizes(gradients_of(optimizer), device)
        state["traces"] = Traces(collect([optimizer]), state["measured"].sizes)
