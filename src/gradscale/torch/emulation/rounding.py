"""Float32 tensors rounded to any format, on their own device."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscale.formats import BF16, FP8_E5M2, FP16, FP32, Format
from gradscale.torch.emulation.draws import Draws

EXPONENT = 0x7F800000
"""The bits of a float32 that hold its exponent. Alone, they are the power of two at or below its magnitude."""

TOP_POWER = 2.0**127
"""The largest power of two in float32: what stands for the power of an inf or a NaN, which must stay what they are."""

CASTS = {FP16: torch.float16, BF16: torch.bfloat16, FP8_E5M2: torch.float8_e5m2}
"""Formats whose cast in torch is quicker than the arithmetic here. Its cast to FP8_E4M3 takes three times as long."""


@dataclass(frozen=True)
class Rounding:
    """A way to round: to nearest, ties to even, as `format.round` does it, or stochastically.

    Attributes:
        format: what to round to.
        saturate: whether overflow, inf included, becomes the largest number. Else it becomes what the format has for
            it: inf, or NaN where there is no inf, or the largest number where there is neither.
        draws: where random numbers come from; None rounds to nearest.
    """

    format: Format
    saturate: bool = False
    draws: Draws | None = None

    def round_(self, values: Tensor) -> Tensor:
        """Rounds float32 values in place, and returns them. Does not wait for the device.

        >>> from gradscale import FP8_E4M3
        >>> Rounding(FP8_E4M3).round_(torch.tensor([1e-3, 0.3, 1000.0])).tolist()
        [0.001953125, 0.3125, nan]
        >>> Rounding(FP8_E4M3, saturate=True).round_(torch.tensor([1000.0])).item()
        448.0
        """
        if self.format == FP32:
            return values
        if self.saturate or not self.format.has_nan:
            values.clamp_(-self.format.max, self.format.max)
        if self.draws is None and self.format in CASTS:
            return values.copy_(values.to(CASTS[self.format]))
        step = _step(values, self.format)
        values.div_(step)
        values.round_() if self.draws is None else _round_stochastically_(values, self.draws)
        values.mul_(step)
        return values if self.saturate and self.format.has_nan else _put_overflow_(values, self.format)


def _step(values: Tensor, format: Format) -> Tensor:
    """Returns the distance between neighbours in the format around each value: a power of two, so dividing is exact."""
    power = (values.view(torch.int32) & EXPONENT).view(torch.float32)
    return power.clamp_(format.smallest_normal, TOP_POWER).mul_(2.0**-format.mantissa_bits)


def _round_stochastically_(steps: Tensor, draws: Draws) -> Tensor:
    """Makes each number one of the two integers around it, the nearer the likelier, so that the mean is kept.

    The part after the point is exact, and is compared with a draw of 24 bits. So the mean is off by 2**-24 at most.
    """
    below = steps.floor()
    up = draws.like(steps) < steps - below
    signed = below.add_(up).copysign_(steps)  # -0.0, and what became zero from below, keep their sign
    return steps.copy_(signed)


def _put_overflow_(values: Tensor, format: Format) -> Tensor:
    """Puts what the format has for overflow, and for NaN, into rounded values, and returns them."""
    if format.has_inf:
        return values.masked_fill_(values > format.max, math.inf).masked_fill_(values < -format.max, -math.inf)
    if format.has_nan:
        return values.masked_fill_(values.abs() > format.max, math.nan)
    return values.masked_fill_(values.isnan(), -0.0)  # as its type has it
