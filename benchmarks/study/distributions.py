"""Learns a distribution: its density, its rate, its quantiles, or the gradient of its density."""

import math
from collections.abc import Iterator

import torch
from benchmarks.study.digits import layers
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from torch import Tensor, nn

BATCH_SIZE = 128
COUPLINGS = 6
INPUTS = 8
LEVELS = torch.tensor([0.02, 0.5, 0.98])


class FlowTask(OneLossTask):
    """A normalizing flow of affine couplings that learns the density of two half-moons."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: nn.ModuleList(layers((1, 32, 32, 2)) for _ in range(COUPLINGS)), 2e-3)

    def batch(self) -> Batch:
        angles = math.pi * torch.rand(BATCH_SIZE, 1, generator=self.random)
        side = torch.randint(2, (BATCH_SIZE, 1), generator=self.random) * 2 - 1
        moons = torch.cat([side * (angles.cos() - 0.5), side * (angles.sin() - 0.25)], 1)
        return moons, 0.1 * torch.randn(BATCH_SIZE, 2, generator=self.random)

    def loss(self, moons: Tensor, noise: Tensor) -> Tensor:
        kept, changed = (moons + noise).split(1, 1)
        volume = torch.zeros(BATCH_SIZE, 1)
        for coupling in self.model.children():
            log_scales, shifts = coupling(kept).float().chunk(2, 1)
            log_scales = 2 * log_scales.tanh()
            volume = volume + log_scales
            kept, changed = changed * log_scales.exp() + shifts, kept
        return ((kept.square() + changed.square()) / 2 + math.log(2 * math.pi) - volume).mean()


class PoissonTask(OneLossTask):
    """Fits counts by a rate that is an exponential of the output. Some batches are counted in another unit.

    Args:
        seed: of the weights and the batches.
        bad_share: share of the batches that are bad.
        bad_factor: what their counts are multiplied by.
    """

    def __init__(self, seed: int, bad_share: float, bad_factor: float) -> None:
        super().__init__(seed, lambda: layers((INPUTS, 64, 64, 1)), 1e-3)
        self._bad_share, self._bad_factor, self._score = bad_share, bad_factor, 0.0
        self._weights = 0.5 * torch.randn(INPUTS, 1, generator=self.random)

    def batch(self) -> Batch:
        inputs = torch.randn(BATCH_SIZE, INPUTS, generator=self.random)
        return inputs, torch.poisson((2 + inputs @ self._weights).clamp(max=6).exp(), generator=self.random)

    def turns(self, step: int) -> Iterator[Turn]:
        inputs, counts = self.batch()
        with torch.no_grad():
            self._score = float(self.loss(inputs, counts))
        bad = float(torch.rand((), generator=self.random)) < self._bad_share
        given = counts * (self._bad_factor if bad else 1.0)
        yield Turn(self.optimizer, lambda: self.loss(inputs, given), bad=bad)

    def loss(self, inputs: Tensor, counts: Tensor) -> Tensor:
        """Returns the mean of the deviance, which is zero for rates that are the counts."""
        logs = self.model(inputs).float()
        return 2 * (torch.xlogy(counts, counts) - counts * logs - counts + logs.exp()).mean()

    def score(self, losses: list[float]) -> float:
        """Returns the loss of the counts in their usual unit, before the step."""
        return self._score


class QuantileTask(OneLossTask):
    """Finds quantiles of a noise that varies with the input. The gradient of a point has one of two sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: layers((3, 64, 64, len(LEVELS))), 1e-3)

    def batch(self) -> Batch:
        inputs = torch.randn(BATCH_SIZE, 3, generator=self.random)
        noise = torch.randn(BATCH_SIZE, 1, generator=self.random) * inputs[:, 1:2].exp()
        return inputs, (2 * inputs[:, :1]).sin() + noise

    def loss(self, inputs: Tensor, values: Tensor) -> Tensor:
        above = values - self.model(inputs).float()
        return torch.maximum(LEVELS * above, (LEVELS - 1) * above).mean()


class ScoreTask(OneLossTask):
    """Denoising score matching on a circle, with noise of one level for many steps, and of the next one after that.

    The loss is not weighted by the level: it grows with the inverse of its square, and so do gradients.

    Args:
        seed: of the weights and the batches.
        block: steps with the same level.
    """

    noises = (1.0, 0.3, 0.1, 0.03)

    def __init__(self, seed: int, block: int) -> None:
        super().__init__(seed, lambda: layers((3, 64, 64, 64, 2)), 1e-3)
        self._block, self._noise = block, self.noises[0]

    def turns(self, step: int) -> Iterator[Turn]:
        self._noise = self.noises[step // self._block % len(self.noises)]
        yield from super().turns(step)

    def batch(self) -> Batch:
        angles = 2 * math.pi * torch.rand(BATCH_SIZE, 1, generator=self.random)
        noise = torch.randn(BATCH_SIZE, 2, generator=self.random)
        points = torch.cat([angles.cos(), angles.sin()], 1) + self._noise * noise
        level = torch.full((BATCH_SIZE, 1), math.log(self._noise))
        return torch.cat([points, level], 1), noise / self._noise

    def loss(self, inputs: Tensor, pulls: Tensor) -> Tensor:
        # The network finds the noise, as usual: what pulls back to the circle is its inverse multiple.
        return (pulls - self.model(inputs).float() / inputs[:, 2:].exp()).square().mean()

    def score(self, losses: list[float]) -> float:
        """Returns the loss, weighted by the square of the noise."""
        return losses[-1] * self._noise**2
