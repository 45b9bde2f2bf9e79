"""A 16-bit remainder beside every weight: the two together are the float32 value."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.contract import MasterStorage
from gradscale.torch.masters.step_buffers import StepBuffer

TIE = 1 << 15
"""The only remainder that an int16 cannot hold: of a value midway between two weights. From the other one, it fits."""

EXPONENT = 0x7F80_0000
"""The bits of a float32 that hold its exponent."""

SMALLEST = (127 - 16) << 23
"""The bits of 2**-16 in float32. Smaller FP16 weights use its unit, which bounds their error by 2**-41."""

SUBNORMAL_STEP = 2.0**-24
"""The distance between subnormal FP16 numbers, the only ones whose remainder can be `TIE`: a normal FP16 number has
13 bits less than float32, so that its remainder is at most 2**13 in units of half a float32 step."""


class Remainder(MasterStorage):
    """Stores, as an int16, what a value loses when it is rounded.

    The weight is the value rounded to nearest. With BF16 every float32 value is restored bit-exactly. With FP16 those
    with 2**-17 <= |value| < 65520 are; smaller ones are restored within 2**-41, and larger ones are inf, as the weight.
    At a tie the weight may be the odd neighbor, where `.to(dtype)` takes the even one.
    """

    # With both of its ties an even BF16 weight would stand for 2**16 + 1 float32 values, one more than an int16 has.

    stored_bytes: ClassVar[int] = 2

    def store(self, weight: Tensor) -> Tensor:
        """Returns zeros: nothing is lost yet."""
        return torch.zeros_like(weight, dtype=torch.int16)

    def read(self, weights: Sequence[Tensor], stored: Sequence[Tensor], buffer: StepBuffer) -> Sequence[Tensor]:
        """Returns the values, computed in `buffer`."""
        values = buffer.like(weights)
        for value, weight, remainder in zip(values, weights, stored, strict=True):
            value.copy_(weight)
            if weight.dtype is torch.bfloat16:
                # The bits of float32 numbers of one sign are consecutive integers, across powers of two as well.
                value.view(torch.int32).add_(remainder)
            else:
                value.sub_(_unit(value).mul_(remainder))
        return values

    def write(
        self,
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
        stored: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        """Splits the values into weights and remainders."""
        del parameters
        for value, weight, remainder in zip(values, weights, stored, strict=True):
            weight.copy_(value)
            (_split_bfloat16 if weight.dtype is torch.bfloat16 else _split_float16)(value, weight, remainder)


def _split_bfloat16(value: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Stores how many float32 numbers lie between each value and its weight: the difference of their bits."""
    lost = value.view(torch.int32) - weight.float().view(torch.int32)
    # At a tie the weight moves to its other neighbor, which is as near. The remainder then fits: as an int16, 2**15
    # wraps around to -2**15.
    weight.view(torch.int16).add_(_ties(lost))
    remainder.copy_(lost)


def _split_float16(value: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Stores what each weight exceeds its value by, in units that depend on the weight; 0 if that is inf or NaN."""
    wide = weight.float()
    # The difference of neighbors is exact (Sterbenz), and so is the division by a power of two. `round_` changes only
    # values below 2**-17, whose last bits are below the unit.
    # Weight minus value, and `sub_` throughout: -0.0 - 0.0 is -0.0, and -0.0 + 0.0 is 0.0.
    lost = (wide - value).div_(_unit(wide)).round_().nan_to_num_(0.0, 0.0, 0.0)
    ties = _ties(lost)
    weight.copy_(wide.sub_(ties, alpha=SUBNORMAL_STEP))
    remainder.copy_(lost.add_(ties, alpha=-2 * TIE))


def _ties(lost: Tensor) -> Tensor:
    """Returns 1 where a remainder is `TIE` and 0 elsewhere, in its own type."""
    # Arithmetic on whole numbers: a comparison and a cast of its bools are slower on the CPU.
    return (1 - (lost - TIE).abs_()).clamp_(min=0)


def _unit(wide: Tensor) -> Tensor:
    """Returns half the distance between each number and the next float32.

    Half, since below a power of two float32 numbers are twice as dense as above it.
    """
    # The step at 2**e is 2**(e - 23): half of it has an exponent that is 24 less.
    bits = wide.view(torch.int32).bitwise_and(EXPONENT).clamp_(min=SMALLEST)
    return bits.sub_(24 << 23).view(torch.float32)
