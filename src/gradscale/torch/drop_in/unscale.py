"""An optimizer's gradients for `GradScaler`: their finite check, and what is noted of them until `update`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.engine.measurement import Measurement
from gradscale.policies.contract import Policy
from gradscale.torch.drop_in.scale_bound import ScaleBound
from gradscale.torch.drop_in.update import measure_for
from gradscale.torch.step.gradients import collect, first_of_each, values_of
from gradscale.torch.step.host_copy import host_value
from gradscale.torch.step.measure import any_overflow, check, measure_sizes
from gradscale.torch.step.result import Traces

Optimizer = torch.optim.Optimizer


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the dense tensors that hold the numbers of the optimizer's gradients, each gradient's once."""
    return gradients_and_sharing(optimizer)[0]


def gradients_and_sharing(optimizer: Optimizer) -> tuple[list[Tensor], bool]:
    """Returns the same, and whether one of the gradients is held twice: by two parameters, or by one listed twice."""
    grads: list[Tensor] = []
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                found.append(grad if grad.layout is torch.strided else _sparse_values(parameter, grad))
                grads.append(parameter.grad)  # read again: coalescing replaces it
    first = first_of_each(grads)
    return (found, False) if len(first) == len(found) else ([found[index] for index in first], True)


def _sparse_values(parameter: Tensor, grad: Tensor) -> Tensor:
    """Returns the values of a sparse gradient. FP16 ones are coalesced first, as in torch: a sum may overflow."""
    # Others are not: coalescing sorts the entries, and sums in float32 rarely overflow.
    if grad.layout is torch.sparse_coo and grad.dtype is not torch.float16:
        return grad._values()
    return values_of(parameter, grad)


def sizes_of(gradients: Sequence[Tensor], device: torch.device) -> Measurement:
    """Returns how large the gradients are, each by itself: of a distributed one, the shard that this rank holds."""
    held = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in gradients]  # type: ignore[attr-defined]
    return measure_sizes(held, device)


def check_scaled(
    gradients: Sequence[Tensor],
    own: Tensor | None,
    state: dict[str, Any],
    scale: Tensor,
    bound: ScaleBound,
    policy: Policy | None,
) -> dict[torch.device, Tensor]:
    """Notes and returns, per device, whether the gradients are finite now and would be once divided by the scale.

    Reads the gradients once and changes none. Does not synchronize with the device.

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
    state["measured"] = measured
    devices = {grad.device for grad in gradients}
    state["found_inf_per_device"] = {device: overflow.to(device, torch.float32) for device in devices}
    return state["found_inf_per_device"]


def note_unscaled(
    optimizer: Optimizer, state: dict[str, Any], flags: dict[torch.device, Tensor], scale: Tensor, bound: ScaleBound
) -> None:
    """Notes in `state` that the gradients are divided, and whether they were finite and still are.

    `flags` are those of the kernel that divided them. One read of the gradients while the scale is below 1, and where
    the host knows of an overflow. Does not synchronize with the device.
    """
    if flags and bound.may_be_below_one(scale):
        # torch's kernel checks the values before it multiplies them: finite ones may be inf after a division by a scale
        # below 1.
        overflow, _ = check(gradients_of(optimizer), torch.ones_like(scale), grows=True)
        flags = {device: torch.maximum(flag, overflow.to(flag)) for device, flag in flags.items()}
    state["found_inf_per_device"] = flags
    state["stage"] = OptState.UNSCALED
    state["groups"] = len(optimizer.param_groups)
    if host_value(any_overflow(flags.values(), scale.device)):
        # Measured now, before the user clips: `clip_grad_norm_` with a norm of NaN makes every element NaN, and every
        # parameter would count as non-finite.
        state["measured"] = sizes_of(gradients_of(optimizer), scale.device)
        state["traces"] = Traces(collect([optimizer]), state["measured"].sizes)
