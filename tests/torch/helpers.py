"""Small models, optimizers and gradients that the tests of the PyTorch adapter share."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch import LossScaler, StepResult

INF, NAN = math.inf, math.nan

Optimizer = torch.optim.Optimizer

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adam fused": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "adam loop": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=False),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=True),
    "adagrad fused": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "adagrad foreach": lambda params: torch.optim.Adagrad(params, lr=1e-2, foreach=True),
}


class Wrapper:
    """Steps the optimizer inside, and looks up there what it does not have itself."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def step(self) -> None:
        self.inside.step()


def autocast(dtype: torch.dtype = torch.float16, enabled: bool = True) -> torch.autocast:
    """Returns autocast of the device that the test runs on."""
    return torch.autocast(torch.get_default_device().type, dtype=dtype, enabled=enabled)


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(seed: int = 0, rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return x, torch.stack([x.sum(1), x.prod(1)], 1)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x, y = batch(seed)
    return nn.functional.mse_loss(model(x), y)


def weights(*modules: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


def same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    held = [state[key] for state in optimizer.state.values() for key in sorted(state)]
    return [value.detach().clone() for value in held if isinstance(value, Tensor)]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def poison(parameter: Any, value: float = INF, at: int = 0) -> None:
    """Puts an inf or a NaN into a gradient, as an overflow would."""
    parameter.grad.reshape(-1)[at] = value


def give(
    scaler: LossScaler, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None], loss: float = 1.0
) -> None:
    """Makes the scaler believe that a backward pass has just made these gradients, scaled as they are."""
    leaf = torch.zeros((), requires_grad=True)
    scaler.backward(leaf * 0 + loss)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def train_step(
    scaler: LossScaler, model: nn.Module, optimizer: Optimizer, seed: int = 0, bad: float | None = None, **kwargs: Any
) -> StepResult:
    """Takes one step, with `bad` put into the first gradient if it is given, and clears the gradients."""
    scaler.backward(loss_of(model, seed))
    if bad is not None:
        poison(next(model.parameters()), bad)
    result = scaler.step(optimizer, **kwargs)
    optimizer.zero_grad()
    return result
