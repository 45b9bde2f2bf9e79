"""Models with one fault each, and the steps of them."""

import math
from collections.abc import Callable

import torch
from tests.torch.helpers import autocast
from torch import Tensor, nn

Step = Callable[[], Tensor]


class Block(nn.Module):
    """A residual block. With a large bias, each branch fits FP16 and their sum does not."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        nn.init.constant_(self.fc2.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(torch.tanh(self.fc1(x)))
        return x + h  # the residual add


class Attention(nn.Module):
    """Attention without the division by the square root of its width."""

    def __init__(self, gain: float = 1.0, mask: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4, bias=False)
        self.key = nn.Linear(4, 4, bias=False)
        self.gain = gain
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x * self.gain) @ self.key(x * self.gain).transpose(-1, -2)
        if self.mask:
            ahead = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(ahead, -math.inf)
        return torch.softmax(scores, -1) @ x


class Stack(nn.Module):
    """An embedding, two parts, and a head."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.parts = nn.ModuleList([first, second])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


def rows(seed: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(torch.get_default_device())


def fp16_step(model: nn.Module, x: Tensor | None = None, weight: float = 1.0) -> Step:
    """Returns a step of a model in FP16 autocast."""
    batch = rows() if x is None else x

    def step() -> Tensor:
        with autocast():
            output = model(batch)
        return output.float().square().mean() * weight

    return step
