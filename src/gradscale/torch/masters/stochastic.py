"""Stochastic rounding: nothing is stored, and updates are unbiased."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.contract import MasterStorage
from gradscale.torch.masters.distributed import part_number
from gradscale.torch.masters.noise import Noise
from gradscale.torch.masters.step_buffers import StepBuffer

NORMAL = 2.0**-14
"""The smallest normal FP16 number."""


class Stochastic(MasterStorage):
    """Rounds to one of the two nearest weights, the nearer one with the higher probability.

    The expected weight is the value, so that updates far below half a unit in its last place add up. Beyond the largest
    finite number it rounds to nearest.

    Args:
        seed: of the random numbers.
    """

    stored_bytes: ClassVar[int] = 0

    def __init__(self, seed: int) -> None:
        self._noise = Noise(seed)

    def store(self, weight: Tensor) -> Tensor:
        """Returns an empty tensor: nothing is stored."""
        return weight.detach().new_empty(0)

    def read(self, weights: Sequence[Tensor], stored: Sequence[Tensor], buffer: StepBuffer) -> Sequence[Tensor]:
        """Returns the weights in float32, in `buffer`."""
        del stored
        values = buffer.like(weights)
        torch._foreach_copy_(values, list(weights))  # pyright: ignore[reportPrivateImportUsage]
        return values

    def write(
        self,
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
        stored: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        """Rounds the values into the weights. Values that the dtype holds exactly are unchanged.

        Replicas of a parameter are rounded alike, and different parts of it by different random numbers.
        """
        del stored
        for value, weight, parameter in zip(values, weights, parameters, strict=True):
            words, whole = _words(value), _words(parameter)
            noise = self._noise.draw(words, value.device, stream=part_number(parameter), advance=whole)
            weight.copy_(_round(value, weight.dtype, noise))

    def restore(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        """Does nothing: the weight is the value."""
        del value, weight, stored

    def end_step(self, skip: Tensor | None) -> None:
        """Goes on to the random numbers of the next step, unless this one was skipped."""
        self._noise.end_step(skip)

    def state(self) -> dict[str, Any]:
        """Returns the state of the random numbers."""
        return self._noise.state()

    def load(self, state: dict[str, Any]) -> None:
        """Continues the random numbers from `state`. The state of another storage is ignored."""
        if "seed" in state:
            self._noise.load(state)


def _round(value: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Returns values that `dtype` holds exactly, or that are larger than its largest finite number.

    Uniform random bits are added to the bits that are cut off, and carry into the rest with the probability of rounding
    up.
    """
    # float32 has 16 bits more than BF16 and 13 more than FP16. Of a subnormal FP16 number more would have to be cut:
    # 2**-14 is added first, after which its last bit is that of a normal number, and subtracted afterwards. Both are
    # exact but for bits far below the last.
    if dtype is torch.bfloat16:
        rounded = _cut(value, 16, noise)
    else:
        lift = _lift(value)
        # A difference of 0 is 0.0, also of two negative numbers: it takes the sign of the value.
        rounded = _cut(value + lift, 13, noise).sub_(lift).copysign_(value)
    return torch.where(value.abs() <= torch.finfo(dtype).max, rounded, value)


def _cut(value: Tensor, bits: int, noise: Tensor) -> Tensor:
    """Returns the values without their last `bits` bits, rounded away from zero with the probability of what is cut."""
    random = _random_bits(value, bits, noise)
    return random.add_(value.view(torch.int32)).bitwise_and_(-1 << bits).view(torch.float32)


def _lift(value: Tensor) -> Tensor:
    """Returns `NORMAL` with the sign of the value for values that are smaller, else 0."""
    # `ceil` makes 1 of every positive difference. `torch.where` on a comparison is slower on the CPU.
    return (NORMAL - value.abs()).clamp_(min=0.0).ceil_().mul_(NORMAL).copysign_(value)


def _words(like: Tensor) -> int:
    """Returns how many 64-bit numbers hold 16 random bits for each element: drawing is most of the cost."""
    return -(-like.numel() // 4)


def _random_bits(like: Tensor, bits: int, noise: Tensor) -> Tensor:
    """Returns uniform random int32 numbers of `bits` bits, at most 16, from random 64-bit numbers."""
    return noise.view(torch.int16)[: like.numel()].view(like.shape).to(torch.int32).bitwise_and_((1 << bits) - 1)
