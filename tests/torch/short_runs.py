"""A short FP16 run whose first gradients overflow at torch's first scale."""

from collections.abc import Callable

import torch
from tests.torch.helpers import autocast, same, weights
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer


def fine_tuned_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def large_loss(model: nn.Module, seed: int = 0) -> Tensor:
    """Returns a loss whose FP16 backward pass overflows at scales above about 2**6."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed), device="cpu").to(torch.get_default_device())
    with autocast():
        out = model(x)
    return (out.float() - 30 * x.sum(1, keepdim=True)).square().sum()


def lost_steps(model: nn.Module, optimizer: Optimizer, train_step: Callable[[Tensor], object], steps: int) -> list[int]:
    """Returns the steps that have left the weights as they were; `train_step` takes the loss of each."""
    lost = []
    for step in range(steps):
        before = weights(model)
        optimizer.zero_grad()
        train_step(large_loss(model, step))
        if same(weights(model), before):
            lost.append(step)
    return lost
