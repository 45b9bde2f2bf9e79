"""A GAN whose two networks take turns under one scale."""

import math
from collections.abc import Iterator

import torch
from benchmarks.study.task import Turn
from torch import Tensor, nn
from torch.nn.functional import softplus

WIDTH, NOISE, BATCH_SIZE, MODES = 32, 4, 64, 8
RATES = (1e-3, 5e-4)


def layers(inputs: int, outputs: int) -> nn.Module:
    """Returns three layers with rectifiers between them."""
    return nn.Sequential(
        nn.Linear(inputs, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, outputs),
    )


class AdversarialTask:
    """Learns to draw points from eight clusters on a circle."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._critic, self._generator = layers(2, 1), layers(NOISE, 2)
        self.model: nn.Module = nn.ModuleList([self._critic, self._generator])
        self._random = torch.Generator().manual_seed(seed)
        self._optimizers = [
            torch.optim.Adam(network.parameters(), rate, (0.5, 0.9), foreach=True)
            for network, rate in zip((self._critic, self._generator), RATES, strict=True)
        ]

    def turns(self, step: int) -> Iterator[Turn]:
        points, noise = self._points(), torch.randn(BATCH_SIZE, NOISE, generator=self._random)
        critic, generator = self._critic, self._generator
        yield Turn(
            self._optimizers[0],
            lambda: (softplus(-critic(points)) + softplus(critic(generator(noise).detach()))).mean(),
        )
        yield Turn(self._optimizers[1], lambda: softplus(-critic(generator(noise))).mean())

    def score(self, losses: list[float]) -> float:
        """Returns how far generated points are from real ones: the mean distance of their sorted coordinates."""
        with torch.no_grad():
            noise = torch.randn(BATCH_SIZE, NOISE, generator=self._random)
            found, points = self._generator(noise).sort(0).values, self._points().sort(0).values
            return float((found - points).abs().mean())

    def _points(self) -> Tensor:
        angles = torch.randint(MODES, (BATCH_SIZE,), generator=self._random) * (2 * math.pi / MODES)
        centers = torch.stack([angles.cos(), angles.sin()], 1)
        return centers + 0.1 * torch.randn(BATCH_SIZE, 2, generator=self._random)
