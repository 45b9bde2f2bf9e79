"""What the tests of master weights share."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from tests.torch.helpers import small_model
from torch import Tensor, nn

from gradscale.torch import MasterWeights
from gradscale.torch.masters import Storage

STORAGES: tuple[Storage, ...] = get_args(Storage)
EXACT: tuple[Storage, ...] = ("fp32", "remainder")
HALF_DTYPES = (torch.float16, torch.bfloat16)

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "sgd dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "adagrad fused": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
}


def half_model(dtype: torch.dtype = torch.float16, seed: int = 0) -> nn.Sequential:
    return small_model(seed).to(dtype)


def wrapped(model: nn.Module, storage: Storage = "fp32", inner: str = "adamw fused", **kwargs: Any) -> MasterWeights:
    if storage == "stochastic":
        kwargs.setdefault("seed", 3)
    return MasterWeights(INNER[inner](model.parameters()), storage, **kwargs)


def give(model: nn.Module, step: int = 0, scale: float = 1.0) -> None:
    """Gives the model gradients that depend on nothing but the step. They are powers of two times 10-bit numbers."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        grad = torch.randint(-512, 512, parameter.shape, generator=generator) * 2.0**-14
        parameter.grad = (grad * scale).to(getattr(parameter, "grad_dtype", None) or parameter.dtype)


def first(model: nn.Module) -> nn.Parameter:
    return next(iter(model.parameters()))


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def values_of(optimizer: MasterWeights) -> list[Tensor]:
    return [value.detach().clone() for _, value in optimizer.masters()]


def everything(model: nn.Module, optimizer: MasterWeights) -> list[Tensor]:
    """Returns all that a step may change."""
    return list(_everything(model, optimizer))


def _everything(model: nn.Module, optimizer: MasterWeights) -> Iterator[Tensor]:
    yield from (parameter.detach().clone() for parameter in model.parameters())
    yield from values_of(optimizer)
    for state in optimizer.state.values():
        yield from (value.detach().clone() for _, value in sorted(state.items()) if isinstance(value, Tensor))
