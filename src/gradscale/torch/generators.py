"""Seeded random number generators, one for each device."""

from typing import Any

import torch


class Generators:
    """Makes a `torch.Generator` for each device when it is first used, all from one seed.

    Can be copied and pickled with the state of the generators, unlike the generators themselves.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._by_device: dict[str, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """Returns the generator of a device."""
        name = str(device)
        if name not in self._by_device:
            self._by_device[name] = torch.Generator(device).manual_seed(self._seed)
        return self._by_device[name]

    def state(self) -> dict[str, Any]:
        """Returns the seed and the state of every generator, as plain values and tensors."""
        states = {device: generator.get_state() for device, generator in self._by_device.items()}
        return {"seed": self._seed, "generators": states}

    def load(self, state: dict[str, Any]) -> None:
        """Continues the random numbers from what `state` returned."""
        self._seed, self._by_device = state["seed"], {}
        for device, numbers in state["generators"].items():
            self.on(torch.device(device)).set_state(numbers.cpu())

    __getstate__ = state
    __setstate__ = load
