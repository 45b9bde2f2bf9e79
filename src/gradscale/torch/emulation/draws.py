"""Where stochastic rounding gets its random numbers."""

import torch
from torch import Tensor


class Draws:
    """Uniform numbers from torch's own random state, or from one of its own.

    Args:
        seed: starts a random state of its own on each device; None draws from torch's.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, values: Tensor) -> Tensor:
        """Returns a number from 0 up to 1, a multiple of 2**-24, for each value."""
        return torch.rand(values.shape, device=values.device, generator=self._generator(values.device))

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self._seed is None:
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]
