"""Regression with targets that a mean square does not suit: of several values, and with heavy tails."""

import math

import numpy as np
import torch
from benchmarks.study.digits import layers
from benchmarks.study.one_loss import Batch, OneLossTask
from torch import Tensor
from torch.nn.functional import mse_loss

COMPONENTS, BATCH_SIZE = 5, 128


class MixtureTask(OneLossTask):
    """A mixture density network that inverts a function which is not one to one.

    Its gradients grow as the components become narrow.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: layers((1, 64, 64, 3 * COMPONENTS)), 2e-3)

    def batch(self) -> Batch:
        values = torch.rand(BATCH_SIZE, 1, generator=self.random)
        noise = 0.02 * torch.randn(BATCH_SIZE, 1, generator=self.random)
        return values + 0.3 * (2 * math.pi * values).sin() + noise, values

    def loss(self, inputs: Tensor, values: Tensor) -> Tensor:
        weights, means, log_widths = self.model(inputs).float().chunk(3, 1)
        squares = ((values - means) * (-log_widths).exp()).square()
        log_densities = weights.log_softmax(1) - log_widths - (squares + math.log(2 * math.pi)) / 2
        return -log_densities.logsumexp(1).mean()


class HeavyTailTask(OneLossTask):
    """Fits a curve with noise of infinite variance, by the mean square: a few points make most of the gradient."""

    freedom = 1.5
    """Degrees of freedom of the noise, which has Student's distribution."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: layers((4, 64, 64, 1)), 1e-3)
        self._rng = np.random.default_rng(seed)
        self._error = 0.0

    def batch(self) -> Batch:
        inputs = torch.randn(BATCH_SIZE, 4, generator=self.random)
        curve = (2 * inputs[:, :1]).sin() + inputs[:, 1:2] * inputs[:, 2:3]
        with torch.no_grad():
            self._error = float(mse_loss(self.model(inputs), curve))
        noise = self._rng.standard_t(self.freedom, (BATCH_SIZE, 1))
        return inputs, curve + torch.from_numpy(noise).float()

    def loss(self, inputs: Tensor, values: Tensor) -> Tensor:
        return mse_loss(self.model(inputs), values)

    def score(self, losses: list[float]) -> float:
        """Returns the error against the curve without noise, before the step."""
        return self._error
