"""Random numbers that are a function of a seed and of the number of applied steps."""

from typing import Any

import torch
from torch import Tensor

from gradscale.torch.step.host_copy import moved

ROUNDS = ((0x9E3779B97F4A7C15 - 2**64, 30), (0xBF58476D1CE4E5B9 - 2**64, 27), (0x94D049BB133111EB - 2**64, 31))
"""Multipliers, as int64, and shifts of SplitMix64 (Steele, Lea and Flood, 2014). The first multiplier is 2**64 over
the golden ratio: its multiples are spread evenly."""

STREAM = 2**40
"""Numbers of one stream, more than a step of any model draws."""


class Noise:
    """Uniform random 64-bit numbers, the same on every device.

    Steps that are skipped are not counted, on the device where only that knows of the skip, so that training continues
    after a skip with the numbers that the skipped step would have used. A `torch.Generator` advances on the host, which
    would have to know.

    Args:
        seed: of the numbers.
    """

    def __init__(self, seed: int) -> None:
        self._seed = (seed + 2**63) % 2**64 - 2**63
        # In host memory until a skip is known to a device only. Kernels take it from there without synchronizing.
        self._steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._position = 0

    def draw(self, count: int, device: torch.device, *, stream: int = 0, advance: int | None = None) -> Tensor:
        """Returns the next `count` numbers of this step, as int64. Does not synchronize with the device.

        Numbers of different streams differ. All streams go on by `advance` numbers, by default by `count`: ranks that
        hold parts of different sizes then still have the same numbers for what follows.
        """
        steps = self._steps if self._steps.is_cpu else moved(self._steps, device)
        key = _mixed(_mixed(steps.clone()).add_(self._seed))
        begin, self._position = self._position + stream * STREAM, self._position + (advance or count)
        return _mixed(torch.arange(begin, begin + count, device=device).add_(key))

    def end_step(self, skip: Tensor | None) -> None:
        """Counts the step, unless `skip`, a 0-d float32, is not 0. Does not synchronize with the device."""
        self._position = 0
        if skip is None:
            self._steps = self._steps + 1
        else:
            self._steps = moved(self._steps, skip.device) + (skip == 0.0)

    def state(self) -> dict[str, Any]:
        """Returns the seed and the number of applied steps."""
        return {"seed": self._seed, "steps": self._steps.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        self._seed, self._steps, self._position = state["seed"], state["steps"].clone(), 0


def _mixed(numbers: Tensor) -> Tensor:
    """Returns the numbers with their bits mixed, so that neighbors have nothing in common. Changes them in place."""
    shifted = torch.empty_like(numbers)  # one for all three shifts: new memory would take longer than they do
    for multiplier, shift in ROUNDS:
        numbers.mul_(multiplier)
        torch.bitwise_right_shift(numbers, shift, out=shifted)
        # The shift of an int64 copies its sign, which the mask takes away.
        numbers.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
    return numbers
