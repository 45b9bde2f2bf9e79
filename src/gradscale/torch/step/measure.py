"""Stage one, measure: one read of the gradients finds whether they are finite, how large, and which are not."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradscale.engine.measurement import Measurement
from gradscale.kernels.torch import (
    DOT_FROM,
    all_on_cpu,
    largest,
    largest_joined,
    norms,
    share_above,
    single,
    single_norm,
    tensor_groups,
)
from gradscale.torch.step import host_copy
from gradscale.torch.step.host_copy import host_value, moved, read_now
from gradscale.torch.step.plan import StepPlan

HALF = (torch.float16, torch.complex32)
"""Types that are divided in FP16."""

DOUBLE = (torch.float64, torch.complex128)
"""Types that are divided in float64."""


def measure(plan: StepPlan, weights: Sequence[float] | None = None) -> Measurement:
    """Returns what one read of the gradients finds; divides them while they are read if the plan says so.

    `weights` are what the elements of each gradient count for the share above an edge; None if all count the same.

    The largest magnitude beside the norm, and a count of elements above an edge, each take a read of their own.
    Does not synchronize with the device.
    """
    values, divisor = plan.gradients.values, plan.divisor
    if plan.divides:
        return divide_and_check(values, divisor)
    if not plan.sizes:
        return measure_if_overflowed(values, divisor, grows=plan.grows, half=plan.half)
    asked = {"norm": plan.norm, "amax": plan.amax, "half": plan.half}
    return measure_sizes(values, divisor.device, edge=plan.edge, weights=weights, **asked, each=False)


def measure_sizes(
    gradients: Sequence[Tensor],
    device: torch.device,
    *,
    norm: bool = False,
    amax: bool = True,
    edge: float | None = None,
    weights: Sequence[float] | None = None,
    half: bool = False,
    each: bool = True,
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
        each: give the largest magnitude of each gradient. Without, small gradients in host memory are measured
            together, and those of each are given only if one is not finite.
    """
    if not (norm or each or half) and edge is None and (found := _joined(gradients, device)) is not None:
        return Measurement(None, found, amax=found)
    return _measured(gradients, device, norm, amax, edge, weights, half)


def _joined(gradients: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Returns the largest magnitude of small gradients in host memory; None for others and where it is not finite."""
    if not host_copy.in_host_memory(device) or not all_on_cpu(gradients):
        return None
    joined = largest_joined(gradients)
    return None if joined is None else torch.full((), joined, dtype=torch.float32, device=device)


def _measured(
    gradients: Sequence[Tensor],
    device: torch.device,
    norm: bool,
    amax: bool,
    edge: float | None,
    weights: Sequence[float] | None,
    half: bool,
) -> Measurement:
    """Returns what `measure_sizes` does, with the size of each gradient."""
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


def check(
    gradients: Sequence[Tensor], divisor: Tensor, *, grows: bool, half: bool = True, amax: bool = False
) -> tuple[Tensor, Measurement | None]:
    """Returns whether a gradient is not finite, as a 0-d bool or the float32 of one, and the sizes if they were read.

    Changes no gradient and does not synchronize with the device. On the CPU, where the outcome is in host memory, sizes
    are read only if they must be, and the largest finite number is no overflow. Elsewhere norms are read, by one
    multi-tensor kernel where largest magnitudes would take a launch for each gradient.

    Args:
        gradients: dense tensors.
        divisor: what the gradients will be divided by, one float32, on the device of the outcome.
        grows: whether a gradient that would not be finite once divided counts too. It can only be so where the
            divisor is below 1.
        half: whether FP16 gradients are divided in FP16, whose range they then may leave.
        amax: whether the sizes are needed, as largest magnitudes.
    """
    on_cpu = host_copy.in_host_memory(divisor.device) and all_on_cpu(gradients)
    if on_cpu and not (grows or amax):
        overflow = _quick_check(gradients, divisor)
        if not host_value(overflow):
            return overflow, None
        # The quick check also flags finite elements above 1.8e19, whose squares are inf: largest magnitudes decide.
    norm, half = not (on_cpu or amax), grows and half
    measurement = measure_sizes(gradients, divisor.device, norm=norm, amax=False, half=half, each=False)
    if on_cpu and not grows:
        # Divided by 1 or more, a finite gradient stays finite.
        return torch.full_like(divisor, not math.isfinite(read_now(measurement.total))), measurement
    return ~measurement.finite(divisor, torch), measurement


def measure_if_overflowed(gradients: Sequence[Tensor], divisor: Tensor, *, grows: bool, half: bool) -> Measurement:
    """Returns the sizes of the gradients, on the CPU only if one of them is not finite. Arguments as in `check`."""
    overflow, measurement = check(gradients, divisor, grows=grows, half=half)
    return _without_sizes(overflow) if measurement is None else measurement


def divide_and_check(gradients: Sequence[Tensor], divisor: Tensor) -> Measurement:
    """Divides every gradient in place and returns whether all were finite before, without their sizes.

    One read and one write. Does not synchronize with the device.
    """
    flags = multiply_and_check(gradients, divisor.reciprocal())
    return _without_sizes(any_overflow(flags.values(), divisor.device))


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
                else moved(found_inf, group.device).clone()
            )
        local = moved(factor, group.device)
        torch._amp_foreach_non_finite_check_and_unscale_(group.tensors, flags[group.device], local)  # type: ignore[attr-defined]
    return flags


def any_overflow(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns one 0-d bool on `device`: whether any flag is set, to 1 or to any other number but 0."""
    # A bool, not a sum of the flags as in torch: fused kernels skip only for a `found_inf` of exactly 1.
    found = [moved(flag, device) for flag in flags]
    if len(found) == 1:
        return found[0].any()
    if not found:
        return torch.zeros((), dtype=torch.bool, device=device)
    return torch.stack([flag.reshape(()) for flag in found]).any()


def all_finite(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the opposite of `any_overflow`."""
    found = list(flags)
    one = moved(found[0], device) if len(found) == 1 and not found[0].ndim else any_overflow(found, device)
    return one.logical_not()


def merged_flag(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns one 0-d float32 on `device` that is 0 if no flag is set: a single one itself, if it is that already."""
    if len(flags) == 1 and flags[0].dtype is torch.float32 and not flags[0].ndim:
        return moved(flags[0], device)
    return any_overflow(flags, device).float()


def _without_sizes(overflow: Tensor) -> Measurement:
    # In float32, the only type of the rule, whatever torch's default type is.
    return Measurement(None, torch.where(overflow, torch.inf, 0.0).to(torch.float32))


def _quick_check(gradients: Sequence[Tensor], divisor: Tensor) -> Tensor:
    """Returns whether a gradient is not finite, or so large that its square is not: the fastest read on the CPU."""
    # By the mean size: below it most norms would cost a call that is longer than its loop.
    if sum([grad.numel() for grad in gradients]) < DOT_FROM * len(gradients):
        return _flagged(gradients, divisor)
    return ~torch.isfinite(torch.linalg.vector_norm(norms(gradients, divisor.device)) / divisor)


def _flagged(gradients: Sequence[Tensor], divisor: Tensor) -> Tensor:
    """Returns whether a gradient is not finite, by torch's kernel: the fastest on the CPU for many small tensors."""
    # The kernel writes what it has read times 1, which is bit-exact, and does not raise the gradients' versions.
    flags = multiply_and_check(gradients, torch.ones_like(divisor))
    return any_overflow(flags.values(), divisor.device)
