"""Stage one, measure: one read of the gradients finds whether they are finite, how large, and which are not."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.host import seeing
from gradscale.engine.measurement import Measurement
from gradscale.formats import FP32
from gradscale.kernels.torch import (
    largest,
    norms,
    share_above,
    single,
    single_norm,
    tensor_groups,
)
from gradscale.policies.contract import Seen
from gradscale.torch import host
from gradscale.torch.host import Facts, filled, to_device
from gradscale.torch.step.apply import StepPlan
from gradscale.torch.window.window import Window

HALF = frozenset((torch.float16, torch.complex32))
"""Types that are divided in FP16."""

DOUBLE = frozenset((torch.float64, torch.complex128))
"""Types that are divided in float64."""


def measure(plan: StepPlan, weights: Sequence[float] | None = None) -> Measurement:
    """Returns what one read of the gradients finds, as tensors; divides them while they are read if the plan says so.

    For ranks, which agree on tensors. `weights` are what the elements of each gradient count for the share above an
    edge; None if all count the same. Does not synchronize with the device.
    """
    if plan.divides:
        # In float32, the only type of the rule, whatever torch's default type is.
        return Measurement(None, torch.where(divide_and_check(plan) == 0, 0.0, torch.inf).to(torch.float32))
    asked = {"norm": plan.norm, "amax": plan.amax, "half": plan.half}
    return measure_sizes(plan.gradients.values, plan.scale.device, edge=plan.edge, weights=weights, **asked)


def seen_here(plan: StepPlan, window: Window, *, gates_on_loss: bool = True) -> Facts:
    """Returns what this rank, alone, has seen of a step. Does not synchronize unless the plan says that the host waits.

    One read of the gradients, which are divided meanwhile if the plan says so. What it finds is one vector on the
    device: of each gradient its norm, then its largest magnitude, if they are read, or one flag for all; then the norm
    of all and the share of elements above an edge, if they are asked for; then the losses and marks of the window; and
    where gradients were edited, their largest magnitude and share before that. `gates_on_loss` is whether a loss that
    is not finite keeps the step from being applied.
    """
    if not plan.gradients.grads:
        return Facts(Seen(), attempted=False)
    values, device, divisor = plan.gradients.values, plan.scale.device, plan.divisor
    count, half, edge = len(values), plan.half, plan.edge is not None
    if plan.divides:
        norm = amax = False
        parts = [divide_and_check(plan).reshape(1)]
    else:
        # Largest magnitudes, unless norms are read anyway: their squares overflow before the gradients do.
        norm, amax = plan.norm, plan.amax or plan.half or not plan.norm
        parts = [norms(values, device)] if norm else []
        parts += [largest(values, device)] if amax else []
    total = None
    if plan.norm:
        total = torch.linalg.vector_norm(parts[0])  # the norm of the norms is the norm of all gradients
        total = total if total.dtype is torch.float32 else single_norm(total)
        parts.append(total)
    if plan.edge is not None:
        parts.append(share_above(values, filled(plan.edge, device), device))
    first = (count * (norm + amax) or 1) + plan.norm + edge
    end = first + len(window.notes)
    parts += [to_device(note, device) for _, note in window.notes]
    edited = plan.edited and window.unscaled is not None
    parts += window.unscaled.sizes() if edited else []  # type: ignore[union-attr]
    vector = torch.hstack(parts) if len(parts) > 1 else parts[0]
    wide = vector.dtype is torch.float64
    dtypes = [grad.dtype for grad in values] if wide or half else []
    marks = [marked for marked, _ in window.notes]  # with the drop-in, others may follow before the numbers arrive

    def read(numbers: list[float]) -> Seen:  # it holds neither plan nor window, and so no gradient
        loss_finite, overflowed = True, False
        for marked, number in zip(marks, numbers[first:end], strict=True):
            if marked:
                overflowed = overflowed or (loss_finite and not math.isfinite(number))
            else:
                loss_finite = loss_finite and math.isfinite(number)
        # An overflow is the cause of a loss that was made from its gradients.
        flags = np.bool_(loss_finite or overflowed), np.bool_(overflowed)
        with np.errstate(all="ignore"):
            if not (norm or amax):
                measurement = Measurement(None, np.float32(math.inf if numbers[0] else 0.0))
            else:
                peaks = numbers[count * norm :][:count] if amax else []
                sizes = zip(numbers, dtypes, strict=False)
                narrow = [size for size, dtype in sizes if dtype not in DOUBLE] if wide else []
                halves = [peak for peak, dtype in zip(peaks, dtypes, strict=True) if dtype in HALF] if half else []
                norm_of_all, peak = numbers[first - edge - 1], greatest(peaks)
                measurement = Measurement(
                    None,
                    (np.float64 if wide else np.float32)(norm_of_all if norm else peak),
                    amax=np.float32(min(peak, FP32.max)) if amax else None,
                    norm=np.float32(norm_of_all) if norm else None,
                    upper_share=np.float32(numbers[first - 1]) if edge else None,
                    half_amax=np.float32(greatest(halves)) if halves else None,
                    single_total=np.float32(greatest(narrow)) if narrow else None,
                )
            seen = seeing(tuple(map(type, measurement)))(measurement, divisor, *flags)
        if not edited:
            return seen
        # From before the edits inside `unscaled`: a policy that saw clipped gradients would raise the scale until the
        # backward pass overflows.
        amax_before, share = map(np.float32, numbers[end:])
        return replace(seen, amax=amax_before if seen.finite else np.float32(np.inf), upper_share=share)

    sizes = parts[0] if norm or amax else None
    if plan.waits:
        return Facts(read(vector.tolist()), sizes=sizes)  # type: ignore[arg-type]
    unscale, gated = 1.0 / float(divisor), vector if gates_on_loss else vector[:first]
    return Facts(
        copy=host.HostCopy(vector),
        read=read,
        sizes=sizes,
        norm=None if total is None else lambda: total * unscale,
        found_inf=(lambda: vector[0]) if plan.divides else (lambda: nonfinite(gated)),
    )


def greatest(sizes: Sequence[float]) -> float:
    """Returns the largest size; NaN if one of them is, and 0 without any."""
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def nonfinite(vector: Tensor, flag: Tensor | None = None) -> Tensor:
    """Returns 1 if a number is not finite, else what `flag` was, which is written to. Does not synchronize."""
    flag = torch.zeros((), dtype=torch.float32, device=vector.device) if flag is None else flag
    # The kernel multiplies what it has read by 1.
    torch._amp_foreach_non_finite_check_and_unscale_([vector], flag, one(flag.device))  # type: ignore[attr-defined]
    return flag


@cache
def one(device: torch.device) -> Tensor:
    """Returns 1 as a 0-d float32 on a device, the same tensor each time, which nobody writes to."""
    with torch.inference_mode(False):
        return filled(1.0, device)


def measure_sizes(
    gradients: Sequence[Tensor],
    device: torch.device,
    *,
    norm: bool = False,
    amax: bool = True,
    edge: float | None = None,
    weights: Sequence[float] | None = None,
    half: bool = False,
) -> Measurement:
    """Returns the sizes of `gradients` on `device`. Does not synchronize with the device.

    Sizes are norms if `norm` is set, else largest magnitudes. A NaN anywhere makes a size NaN; an inf makes it
    inf. A finite float32 gradient above 1.8e19 squares to inf and so counts as an overflow when norms are read.

    Args:
        gradients: dense tensors of any floating or complex type, on any device.
        device: where the results go.
        norm: read norms.
        amax: read largest magnitudes; those are read without `norm` in any case.
        edge: count the elements above this magnitude.
        weights: what the elements of each gradient count there; None if all count the same.
        half: read the largest magnitude of FP16 gradients too: one that is divided in FP16, by a scale below 1, may
            leave its range.
    """
    if norm:
        sizes = norms(gradients, device)
        total = torch.linalg.vector_norm(sizes)  # the norm of the norms is the norm of all gradients
        peak = _largest(gradients, device)[1] if amax else None
    else:
        sizes, total = _largest(gradients, device)
        peak = total
    halves = [grad for grad in gradients if grad.dtype in HALF] if half else []
    return Measurement(
        sizes,
        total,
        amax=None if peak is None else single(peak),
        norm=single_norm(total) if norm else None,
        upper_share=None if edge is None else share_above(gradients, torch.full_like(total, edge), device, weights),
        half_amax=largest(halves, device).amax() if halves else None,
        single_total=_single_total(gradients, sizes),
    )


def _largest(gradients: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the largest magnitude in each gradient, and that in all of them."""
    sizes = largest(gradients, device)
    return sizes, sizes.amax() if gradients else sizes.sum()  # an empty vector has a sum, 0, and no maximum


def _single_total(gradients: Sequence[Tensor], sizes: Tensor) -> Tensor | None:
    """Returns the largest size of gradients narrower than float64, in float32, if there are wider ones beside them."""
    if sizes.dtype is not torch.float64:
        return None
    # Not by an index, which would be copied to the device.
    found = [size for size, grad in zip(sizes.unbind(), gradients, strict=True) if grad.dtype not in DOUBLE]
    return torch.stack(found).amax().float() if found else None


def divide_and_check(plan: StepPlan) -> Tensor:
    """Divides the gradients in the pass that checks them, and returns 0 if all were finite, else 1."""
    factor = plan.scale.reciprocal()
    return merged_flag(list(multiply_and_check(plan.gradients.values, factor).values()), plan.scale.device)


@torch.no_grad()
def multiply_and_check(
    gradients: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None
) -> dict[torch.device, Tensor]:
    """Multiplies `gradients` in place and returns, per device, whether one was not finite before: torch's own kernel.

    `factor` and `found_inf`, by default 0, are one float32 each. The second is copied to every device, and set to 1
    there if a gradient was not finite. One read and one write of the gradients. Does not synchronize with the device.
    """
    flags: dict[torch.device, Tensor] = {}
    for group in tensor_groups(gradients):
        if group.device not in flags:
            # A copy even where it is on that device already, as torch's callers expect. The kernel only ever sets it to
            # 1, so that all groups of a device share one.
            flags[group.device] = (
                torch.zeros_like(factor, device=group.device)
                if found_inf is None
                else to_device(found_inf, group.device).clone()
            )
        local = to_device(factor, group.device)
        torch._amp_foreach_non_finite_check_and_unscale_(group.tensors, flags[group.device], local)  # type: ignore[attr-defined]
    return flags


def merged_flag(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns one 0-d float32 on `device`: 1 if any flag is set, to 1 or to another number, else 0.

    A single flag that is a 0-d float32 already is returned as it is.
    """
    # Not a sum of the flags as in torch: fused kernels skip only for a `found_inf` of exactly 1.
    found = [to_device(flag, device) for flag in flags]
    if len(found) == 1 and found[0].dtype is torch.float32 and not found[0].ndim:
        return found[0]
    if not found:
        return filled(0.0, device)
    return torch.stack([flag.reshape(()) for flag in found]).any().float()
