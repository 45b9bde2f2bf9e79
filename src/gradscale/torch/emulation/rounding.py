"""Rounds float32 tensors to any format, on their own device: values in place, and gradients in the backward pass.

Autograd does not see the rounding: its gradient is taken to be 1, as that of a cast. A function that saves its result
for the backward pass has saved the rounded one, as it would in FP16. Gradients of gradients are rounded too.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # type: ignore[attr-defined]

from gradscale.formats import BF16, FP8_E5M2, FP16, FP32, Format

EXPONENT = 0x7F800000
"""The exponent bits of a float32. Alone, they are the power of two at or below its magnitude."""

TOP_POWER = 2.0**127
"""The largest power of two in float32. Used as the power of inf and NaN, so that rounding does not change them."""

CASTS = {FP16: torch.float16, BF16: torch.bfloat16, FP8_E5M2: torch.float8_e5m2}
"""Formats whose cast in torch is faster than the arithmetic here. Its cast to FP8_E4M3 takes three times as long."""

ONE = torch.tensor(1.0, device="cpu")


class UniformNumbers:
    """Random numbers for stochastic rounding.

    Args:
        seed: of generators of its own, one for each device; None uses torch's default ones.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, values: Tensor) -> Tensor:
        """Returns a multiple of 2**-24 in [0, 1) for each value."""
        device = values.device
        if self._seed is not None and device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return torch.rand(values.shape, device=device, generator=self._generators.get(device))


@dataclass(frozen=True)
class Rounding:
    """Rounds to nearest, ties to even, as `format.round` does, or stochastically.

    Attributes:
        format: the format to round to.
        saturate: whether overflow, inf included, becomes the largest number. Else it becomes inf, or NaN in a format
            without inf, or the largest number in one that has neither.
        random: the random numbers of stochastic rounding; None rounds to nearest.
    """

    format: Format
    saturate: bool = False
    random: UniformNumbers | None = None

    def round_(self, values: Tensor) -> Tensor:
        """Rounds float32 values in place, and returns them. Does not synchronize with the device.

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
        if self.random is None and self.format in CASTS:
            return values.copy_(values.to(CASTS[self.format]))
        step = _step(values, self.format)
        # In steps of the format, rounding is rounding to an integer. Division and product by a power of two are exact.
        values.div_(step)
        values.round_() if self.random is None else _round_stochastically_(values, self.random)
        values.mul_(step)
        return values if self.saturate and self.format.has_nan else _put_overflow_(values, self.format)


def round_result(tensor: Tensor, values: Rounding, grads: Rounding) -> Tensor:
    """Rounds a new result, which nothing else may refer to, in place, and its gradient in the backward pass."""
    inner = tensor
    while functorch.is_batchedtensor(inner):  # inside `vmap`, which has no `data`
        inner = functorch.get_unwrapped(inner)
    # Through `data`: autograd neither records the rounding nor raises for a result that a function has saved.
    values.round_(inner.data)
    return round_grads(tensor, grads)


def round_copy(tensor: Tensor, values: Rounding, grads: Rounding) -> Tensor:
    """Returns a rounded copy of a tensor, whose gradient is rounded in the backward pass."""
    # A product with 1, for which autograd saves a tensor, and not a `clone`: a checkpoint that is recomputed without
    # emulation then saves fewer tensors than at first, and torch raises an error. It would silently be float32.
    return round_result(tensor * ONE, values, grads)


def round_grads(tensor: Tensor, grads: Rounding) -> Tensor:
    """Rounds the gradient of a tensor in the backward pass, and returns the tensor."""
    if tensor.requires_grad and grads.format != FP32:
        tensor.register_hook(lambda grad: round_copy(grad, grads, grads))
    return tensor


def _step(values: Tensor, format: Format) -> Tensor:
    """Returns the distance between neighbors in the format around each value, a power of two."""
    power = (values.view(torch.int32) & EXPONENT).view(torch.float32)
    return power.clamp_(format.smallest_normal, TOP_POWER).mul_(2.0**-format.mantissa_bits)


def _round_stochastically_(steps: Tensor, random: UniformNumbers) -> Tensor:
    """Rounds each number to one of the two integers around it, the nearer with the higher probability."""
    # The fraction is exact, and is compared with a random number of 24 bits, so that the mean is off by at most 2**-24.
    below = steps.floor()
    up = random.like(steps) < steps - below
    signed = below.add_(up).copysign_(steps)  # -0.0, and negative numbers that round to zero, keep their sign
    return steps.copy_(signed)


def _put_overflow_(values: Tensor, format: Format) -> Tensor:
    """Replaces overflow and NaN in rounded values by the format's inf, NaN or -0, and returns them."""
    if format.has_inf:
        return values.masked_fill_(values > format.max, math.inf).masked_fill_(values < -format.max, -math.inf)
    if format.has_nan:
        return values.masked_fill_(values.abs() > format.max, math.nan)
    return values.masked_fill_(values.isnan(), -0.0)  # as in ml_dtypes
