"""One optimizer's step for `GradScaler`: in a fused kernel, behind a gate, or with the scaler as its argument."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.engine.measurement import Measurement
from gradscale.torch.drop_in.refusals import refuse_half
from gradscale.torch.drop_in.unscale import gradients_of
from gradscale.torch.step import apply
from gradscale.torch.step.host_copy import host_value
from gradscale.torch.step.measure import all_finite, measure_sizes

Optimizer = torch.optim.Optimizer


class Stepped(NamedTuple):
    """What is known of an optimizer's step.

    Attributes:
        returned: what the optimizer's `step` returned; None if it was not called.
        gate: whether all gradients were finite, a 0-d bool.
        measured: how large the gradients were; None if that was not read.
        applied: whether the step was applied; None if only the device knows.
    """

    returned: Any
    gate: Tensor
    measured: Measurement | None
    applied: bool | None


def divide_once(optimizer: Optimizer, scale: Tensor) -> None:
    """Divides the gradients by the scale, one that several parameters hold too, or raises if one is in FP16."""
    gradients = gradients_of(optimizer)
    refuse_half(optimizer, gradients)
    apply.multiply(gradients, scale.reciprocal())


def step_folded(
    optimizer: Optimizer, state: dict[str, Any], scale: Tensor, divisor: Tensor | None, *args: Any, **kwargs: Any
) -> Stepped:
    """Steps a fused optimizer, whose kernel divides by `divisor` and skips an overflow. Does not synchronize.

    `divisor` is None if the gradients are divided already.
    """
    gate = all_finite(state["found_inf_per_device"].values(), scale.device)
    returned = apply.step_folded(optimizer, divisor, gate, *args, **kwargs)
    measured, applied = state.get("measured"), host_value(gate)
    if measured is None and applied == 0:
        measured = measure_sizes(gradients_of(optimizer), scale.device)
    return Stepped(returned, gate, measured, None if applied is None else bool(applied))


def step_gated(optimizer: Optimizer, state: dict[str, Any], scale: Tensor, *args: Any, **kwargs: Any) -> Stepped:
    """Steps an optimizer on divided gradients if they are finite. Synchronizes with the device, once."""
    gate = all_finite(state["found_inf_per_device"].values(), scale.device)
    if bool(gate):
        return Stepped(optimizer.step(*args, **kwargs), gate, None, applied=True)
    apply.hold(optimizer)
    measured = state.get("measured") or measure_sizes(gradients_of(optimizer), scale.device)
    return Stepped(None, gate, measured, applied=False)


def step_with_scaler(optimizer: Optimizer, scaler: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what the `step` of an optimizer returns that takes `grad_scaler`, and does all of it itself."""
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
        stacklevel=3,
    )
    return optimizer.step(*args, **kwargs, grad_scaler=scaler)  # type: ignore[call-overload]
