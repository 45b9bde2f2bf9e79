"""A quicker look than `measure`, for when nobody needs sizes: is every gradient finite?"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradscale.torch.drop_in.unscale import any_overflow, multiply_and_check
from gradscale.torch.step import host_copy as letter
from gradscale.torch.step.groups import all_on_cpu
from gradscale.torch.step.host_copy import on_host
from gradscale.torch.step.measure import DOT_FROM, Measured, measure


def check(
    gradients: Sequence[Tensor], divisor: Tensor, *, divided: bool, half: bool = True, amax: bool = False
) -> tuple[Tensor, Measured | None]:
    """Returns whether a gradient is not finite, as a 0-d bool, and the sizes of the gradients if they were read.

    Changes no gradient and does not wait for the device. On the CPU, where to look at the outcome is free, sizes are
    read only if they must be, and the largest finite number is no overflow. Elsewhere norms are read, by one
    multi-tensor kernel where largest magnitudes would take a launch for each gradient.

    Args:
        gradients: dense tensors.
        divisor: what the gradients will be divided by, one float32, on the device of the outcome.
        divided: whether a gradient that would not be finite once divided counts too. It can only be so where the
            divisor is below 1.
        half: whether FP16 gradients are divided in FP16, whose range they then may leave.
        amax: whether the sizes are needed, as largest magnitudes.
    """
    if any(hasattr(kind, "to_local") for kind in set(map(type, gradients))):
        # Distributed tensors: torch's kernel knows how to agree on the flag, and norms of shards are only partial.
        return _flagged(gradients, divisor), None
    on_cpu = letter.free_to_look(divisor.device) and all_on_cpu(gradients)
    if on_cpu and not (divided or amax):
        overflow = _glanced(gradients, divisor)
        if not on_host(overflow):
            return overflow, None
    measured = measure(gradients, divisor.device, norm=not (on_cpu or amax), half=divided and half)
    return ~measured.finite(divisor), measured


def measure_if_overflowed(gradients: Sequence[Tensor], unit: Tensor, *, divided: bool, half: bool) -> Measured:
    """Returns the sizes of the gradients; on the CPU only if one of them is not finite, and otherwise none.

    Args:
        gradients: dense tensors.
        unit: what they will be divided by, one float32.
        divided: whether `unit` may be below 1, so that a gradient may not be finite once divided.
        half: whether FP16 gradients are divided in FP16.
    """
    overflow, measured = check(gradients, unit, divided=divided, half=half)
    return _without_sizes(overflow) if measured is None else measured


def divide_and_check(gradients: Sequence[Tensor], divisor: Tensor) -> Measured:
    """Divides every gradient in place and returns whether all were finite before, without their sizes.

    One read and one write. Does not wait for the device.
    """
    flags = multiply_and_check(gradients, divisor.reciprocal(), torch.zeros_like(divisor))
    return _without_sizes(any_overflow(flags.values(), divisor.device))


def _without_sizes(overflow: Tensor) -> Measured:
    # In float32 whatever torch's default type is: the rule takes no other.
    total = torch.where(overflow, torch.inf, 0.0).to(torch.float32)
    return Measured(total.new_zeros(0), total, None)


def _glanced(gradients: Sequence[Tensor], divisor: Tensor) -> Tensor:
    """Returns whether a gradient is not finite, or so large that its square is not: the fastest read on the CPU."""
    if sum([grad.numel() for grad in gradients]) < DOT_FROM * len(gradients):
        return _flagged(gradients, divisor)
    return ~measure(gradients, divisor.device, norm=True, half=False).finite(divisor)


def _flagged(gradients: Sequence[Tensor], divisor: Tensor) -> Tensor:
    """Returns whether a gradient is not finite, by torch's kernel: the fastest on the CPU for many small tensors."""
    one = torch.ones((), dtype=torch.float32, device=divisor.device)
    return any_overflow(multiply_and_check(gradients, one, torch.zeros_like(one)).values(), divisor.device)
