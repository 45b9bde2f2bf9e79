"""A 16-bit remainder beside every weight: the two of them together are the float32 value."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.scratch import Scratch
from gradscale.torch.masters.way import Stateless, refined

TIE = 1 << 15
"""The one remainder that an int16 cannot hold: a value midway between two weights, the even one below it."""

EXPONENT = 0x7F80_0000
"""The bits of a float32 that hold its exponent."""

SMALLEST = 111 << 23
"""The exponent of 2**-16, as bits. FP16 weights below it have the units of one that is as large."""

HALF_STEP = 2.0**-24
"""What lies between two FP16 numbers wherever a remainder can be `TIE`."""


class Remainder(Stateless):
    """Keeps, as an int16, what the rounding of a value took away.

    The weight is the value rounded to nearest. With BF16 every float32 value comes back bit for bit. With FP16 those
    with 2**-17 <= |value| < 65520 do; smaller ones come back within 2**-41, and larger ones are inf, as in the weight.
    Of two weights that are equally near, it may be the odd one, where `.to(dtype)` takes the even one: an even weight
    would stand for one value more than 16 bits can tell apart.
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
                value.add_(_unit(value).mul_(remainder))
        return values

    def write(self, values: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Takes the values apart."""
        for value, weight, remainder in zip(values, weights, kept, strict=True):
            weight.copy_(value)
            (_lost_by_bfloat16 if weight.dtype is torch.bfloat16 else _lost_by_half)(value, weight, remainder)

    def adopt(self, weight: Tensor, kept: Tensor) -> None:
        """Forgets the remainders: it is not known which weights are still the same."""
        del weight
        kept.zero_()

    def restore(self, value: Tensor, weight: Tensor, kept: Tensor) -> None:
        """Takes over saved values wherever the weight is what they round to."""
        self.write([refined(weight, value)], [weight], [kept])


def _lost_by_bfloat16(value: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Notes how many float32 numbers lie between each value and its weight, in the order of their bits."""
    lost = value.view(torch.int32) - weight.float().view(torch.int32)
    # The next weight is as near, and the remainder fits: as an int16, 2**15 wraps around to -2**15.
    weight.view(torch.int16).add_(_ties(lost))
    remainder.copy_(lost)


def _lost_by_half(value: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Notes how far each value is from its weight, in units that go by the weight; 0 if that is inf or NaN."""
    wide = weight.float()
    lost = (value - wide).div_(_unit(wide)).round_().nan_to_num_(0.0, 0.0, 0.0)
    ties = _ties(lost)
    weight.copy_(wide.add_(ties, alpha=HALF_STEP))
    remainder.copy_(lost.add_(ties, alpha=-2 * TIE))


def _ties(lost: Tensor) -> Tensor:
    """Returns 1 where a remainder is `TIE` and 0 elsewhere, in its own type. A comparison would be slow on the CPU."""
    return (1 - (lost - TIE).abs_()).clamp_(min=0)


def _unit(wide: Tensor) -> Tensor:
    """Returns half of what lies between each number and the next float32: it lies below a power of two, too."""
    bits = wide.view(torch.int32).bitwise_and(EXPONENT).clamp_(min=SMALLEST)
    return bits.sub_(24 << 23).view(torch.float32)
