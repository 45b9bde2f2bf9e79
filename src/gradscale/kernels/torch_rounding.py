"""Rounds float32 tensors to any format, on their own device: values in place, and gradients in the backward pass.

To autograd it is a cast, of gradient 1. A function that saves its result for the backward pass saves the rounded one.
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
    """Random numbers for stochastic rounding, of generators of its own with a seed, else of torch's."""

    def __init__(self, seed: int | None) -> None:
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def like(self, values: Tensor) -> Tensor:
        """Returns a multiple of 2**-24 in [0, 1) for each value."""
        device = values.device
        if self._seed is not None and device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return torch.rand(values.shape, device=device, generator=self._generators.get(device))


@dataclass(frozen=True)
class Rounding:
    """Rounds to nearest, ties to even, as `format.round` does; with `random`, stochastically."""

    format: Format
    saturate: bool = False
    """Whether overflow, inf included, becomes the largest number. Else it becomes inf, or NaN in a format without inf,
    or the largest number in one that has neither."""
    random: UniformNumbers | None = None

    def round_(self, values: Tensor) -> Tensor:
        """Rounds float32 values in place, and returns them. Does not synchronize with the device."""
        if self.format == FP32:
            return values
        if self.saturate or not self.format.has_nan:
            values.clamp_(-self.format.max, self.format.max)
        if self.random is None and self.format in CASTS:
            return values.copy_(values.to(CASTS[self.format]))
        # The distance between neighbors in the format around each value, a power of two. In steps of it, rounding is
        # rounding to an integer. Division and product by a power of two are exact.
        power = (values.view(torch.int32) & EXPONENT).view(torch.float32)
        step = power.clamp_(self.format.smallest_normal, TOP_POWER).mul_(2.0**-self.format.mantissa_bits)
        values.div_(step)
        if self.random is None:
            values.round_()
        else:
            # One of the two integers around it, the nearer with the higher probability. The fraction is exact, and is
            # compared with a random number of 24 bits, so that the mean is off by at most 2**-24.
            below = values.floor()
            up = self.random.like(values) < values - below
            # -0.0, and negative numbers that round to zero, keep their sign.
            values.copy_(below.add_(up).copysign_(values))
        values.mul_(step)
        if not self.format.has_nan:
            return values.masked_fill_(values.isnan(), -0.0)  # as in ml_dtypes
        if self.saturate:
            return values
        overflow = math.inf if self.format.has_inf else math.nan
        values.masked_fill_(values > self.format.max, overflow)
        return values.masked_fill_(values < -self.format.max, -overflow)


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
