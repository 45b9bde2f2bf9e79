"""A physics-informed network: it solves a differential equation, as its derivatives are in the loss."""

import math
from itertools import pairwise

import torch
from benchmarks.study.one_loss import Batch, OneLossTask
from torch import Tensor, nn
from torch.nn.functional import mse_loss

POINTS, WAVE, ENDS_WEIGHT = 64, 2 * math.pi, 100.0
WIDTHS = (1, 32, 32, 1)


class Curve(nn.Module):
    """Returns the value, the first and the second derivative of a curve.

    They are carried forward together. Two passes of autograd would have the same numbers in FP32, but compute the
    derivatives in the format of gradients, without a scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(WIDTHS))
        self.biases = nn.ParameterList(torch.zeros(outputs) for outputs in WIDTHS[1:])

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first_layer, *others = self.layers.children()
        first_bias, *biases = self.biases
        value, first, second = self._through(
            first_layer, first_bias, inputs, torch.ones_like(inputs), torch.zeros_like(inputs)
        )
        for layer, bias in zip(others, biases, strict=True):
            bent = value.tanh()
            slope = 1 - bent.square()
            second = slope * second - 2 * bent * slope * first.square()
            value, first, second = self._through(layer, bias, bent, slope * first, second)
        return value, first, second

    @staticmethod
    def _through(layer: nn.Module, bias: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, first, second = layer(torch.stack(parts)).float().unbind()
        return value + bias, first, second


class EquationTask(OneLossTask):
    """Solves the Poisson equation u'' = f on an interval, at whose ends u is zero."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Curve, 2e-3)
        self._error = 0.0

    def batch(self) -> Batch:
        inputs = torch.rand(POINTS, 1, generator=self.random)
        solution = (WAVE * inputs).sin()
        with torch.no_grad():
            self._error = float(mse_loss(self.model(inputs)[0], solution).sqrt())
        return inputs, -(WAVE**2) * solution

    def loss(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        ends = self.model(torch.tensor([[0.0], [1.0]]))[0]
        return mse_loss(self.model(inputs)[2], wanted) + ENDS_WEIGHT * ends.square().mean()

    def score(self, losses: list[float]) -> float:
        """Returns the root of the mean square error against the solution, before the step."""
        return self._error
