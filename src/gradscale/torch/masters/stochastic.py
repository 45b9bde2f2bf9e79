"""Stochastic rounding: nothing is kept, and every update counts on average."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradscale.torch.masters.scratch import Scratch

NORMAL = 2.0**-14
"""The smallest normal FP16 number."""


class Stochastic:
    """Rounds to one of the two nearest weights, to each as often as the value is near to it.

    The mean of the weight is the value, so that updates far below half a unit in its last place add up. Beyond the
    largest finite number it rounds to nearest.

    Args:
        seed: of the random numbers. Every device has a generator of its own.
    """

    kept_bytes: ClassVar[int] = 0
    holds_values: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}

    def keep(self, weight: Tensor) -> Tensor:
        """Returns an empty tensor: nothing is kept."""
        return weight.detach().new_empty(0)

    def read(self, weights: Sequence[Tensor], kept: Sequence[Tensor], scratch: Scratch) -> Sequence[Tensor]:
        """Returns the weights in float32, in `scratch`."""
        del kept
        values = scratch.like(weights)
        torch._foreach_copy_(values, list(weights))  # pyright: ignore[reportPrivateImportUsage]
        return values

    def write(self, values: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Rounds the values into the weights. Those that are exact stay as they are."""
        del kept
        for value, weight in zip(values, weights, strict=True):
            weight.copy_(_rounded(value, weight.dtype, self._generator(value.device)))

    def adopt(self, weight: Tensor, kept: Tensor) -> None:
        """Does nothing: the weight is all there is."""
        del weight, kept

    def restore(self, value: Tensor, weight: Tensor, kept: Tensor) -> None:
        """Does nothing: the weight is all there is."""
        del value, weight, kept

    def state(self) -> dict[str, Any]:
        """Returns where the random numbers are, device by device."""
        return {
            "seed": self._seed,
            "generators": {device: generator.get_state() for device, generator in self._generators.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on with the random numbers where `state` left them. What another way has saved is ignored."""
        if "seed" not in state:
            return
        self._seed, self._generators = state["seed"], {}
        for device, numbers in state["generators"].items():
            self._generator(torch.device(device)).set_state(numbers.cpu())

    def _generator(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[name]

    def __getstate__(self) -> dict[str, Any]:
        """Generators can be neither copied nor pickled; their state can."""
        return self.state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._generators = {}
        self.load(state)


def _rounded(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns values that `dtype` holds exactly, or that lie beyond its largest finite number.

    Random bits are added to those that will be cut off, and carry into the rest as often as they should. A subnormal
    FP16 number is lifted first to where its last bit is that of a normal one.
    """
    cut = 16 if dtype is torch.bfloat16 else 13
    lift = _lift(value) if cut == 13 else 0.0
    bits = (value + lift).view(torch.int32).add_(_noise(value, cut, generator)).bitwise_and_(-1 << cut)
    return torch.where(value.abs() <= torch.finfo(dtype).max, bits.view(torch.float32).sub_(lift), value)


def _lift(value: Tensor) -> Tensor:
    """Returns `NORMAL`, away from zero, for what is smaller, else 0. A comparison would be slow on the CPU."""
    return (NORMAL - value.abs()).clamp_(min=0.0).ceil_().mul_(NORMAL).copysign_(value)


def _noise(like: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Returns random int32 numbers of so many bits, at most 16. Four of them are cut from one of 64: much quicker."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[: like.numel()].view(like.shape).to(torch.int32).bitwise_and_((1 << bits) - 1)
