"""A 16-bit remainder beside every weight: the two of them together are the float32 value."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.scratch import Scratch
from gradscale.torch.masters.way import Stateless, refined

TIE = 1 << 15
"""The one remainder that an int16 cannot hold: a value midway between two weights, the even one nearer to zero."""

NORMAL = 2.0**-14
"""The smallest normal FP16 number. Below, FP16 numbers are 2**-24 apart."""

GRAIN = 2.0**-40
"""The unit of the remainder of a subnormal FP16 weight: half of 2**-24 is then 2**15 of them."""


class Remainder(Stateless):
    """Keeps, as an int16, what the rounding of a value took away.

    The weight is the value rounded to nearest. With BF16 every float32 value comes back bit for bit. With FP16 those
    with 2**-17 <= |value| < 65520 do; smaller ones come back within 2**-41, and larger ones are inf, as in the weight.
    Of two weights that are equally near, the one farther from zero is taken. `.to(dtype)` takes the even one, and then
    an even weight stands for one value more than 16 bits can tell apart.
    """

    kept_bytes: ClassVar[int] = 2
    holds_values: ClassVar[bool] = False

    def keep(self, weight: Tensor) -> Tensor:
        """Returns zeros: nothing is lost yet."""
        return torch.zeros_like(weight, dtype=torch.int16)

    def read(self, weights: Sequence[Tensor], kept: Sequence[Tensor], scratch: Scratch) -> Sequence[Tensor]:
        """Returns the values, put together in `scratch`."""
        values = scratch.like(weights)
        for value, weight, remainder in zip(values, weights, kept, strict=True):
            value.copy_(weight)
            if weight.dtype is torch.bfloat16:
                value.view(torch.int32).add_(remainder)
            else:
                _add_to_half(value, remainder)
        return values

    def write(self, values: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Takes the values apart."""
        for value, weight, remainder in zip(values, weights, kept, strict=True):
            rounded = value.to(weight.dtype)
            lost = (_lost_by_bfloat16 if weight.dtype is torch.bfloat16 else _lost_by_half)(value, rounded)
            # The next weight away from zero is as near, and the remainder fits: 2**15 wraps around to -2**15.
            rounded.view(torch.int16).add_(lost == TIE)
            remainder.copy_(lost)
            weight.copy_(rounded)

    def adopt(self, weight: Tensor, kept: Tensor) -> None:
        """Forgets the remainders: it is not known which weights are still the same."""
        del weight
        kept.zero_()

    def restore(self, value: Tensor, weight: Tensor, kept: Tensor) -> None:
        """Takes over saved values wherever the weight is what they round to."""
        self.write([refined(weight, value)], [weight], [kept])


def _add_to_half(value: Tensor, remainder: Tensor) -> None:
    """Adds remainders to float32 values of FP16 weights: in float32's last places, or in `GRAIN` if subnormal."""
    small = (value.abs() + remainder.float() * GRAIN).copysign_(value)
    normal = value.abs() >= NORMAL
    value.view(torch.int32).add_(remainder)
    value.copy_(torch.where(normal, value, small))


def _lost_by_bfloat16(value: Tensor, rounded: Tensor) -> Tensor:
    """Returns how many float32 numbers lie between each value and what it was rounded to, as int32."""
    return value.view(torch.int32) - rounded.float().view(torch.int32)


def _lost_by_half(value: Tensor, rounded: Tensor) -> Tensor:
    """Returns the same for FP16, but in `GRAIN` where that is subnormal, and 0 where it is inf or NaN."""
    wide = rounded.float()
    units = value.view(torch.int32) - wide.view(torch.int32)
    grains = ((value.abs() - wide.abs()) / GRAIN).round_().to(torch.int32)
    lost = torch.where(wide.abs() >= NORMAL, units, grains)
    return torch.where(wide.isfinite(), lost, 0)
