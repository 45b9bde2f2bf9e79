"""Loops and small tools that the tests of the drop-in share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.torch.helpers import poison
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale.engine.saved import KEY
from gradscale.torch import GradScaler, StepResult

Optimizer = torch.optim.Optimizer

TORCH = torch.amp.GradScaler
OURS = GradScaler

HOST_READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"}


def linear_pair(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(count)]


def parameter(value: float = 1.0, shape: tuple[int, ...] = (3,), **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value, **kwargs))


def ready(scaler: Any) -> Any:
    """Returns the scaler after its scale has come to be, as the first loss makes it."""
    scaler.scale(torch.ones(()))
    return scaler


def give(*pairs: tuple[nn.Parameter, Any]) -> None:
    """Sets gradients as a backward pass would: a number fills the whole gradient."""
    for owner, grad in pairs:
        owner.grad = grad if isinstance(grad, Tensor) else torch.full_like(owner, grad)


def grad_of(owner: Any) -> Tensor:
    """Returns the gradient of a parameter that has one."""
    return owner.grad


def last_of(scaler: GradScaler) -> StepResult:
    """Returns the result of a step that has been made."""
    assert scaler.last is not None
    return scaler.last


def saved_by(scaler: Any) -> dict[str, Any]:
    """Returns the entries that torch's scaler saves."""
    return {name: value for name, value in scaler.state_dict().items() if name != KEY}


def train(
    scaler: Any,
    optimizer_of: Callable[[Any], Optimizer],
    steps: int = 6,
    bad_step: int | None = None,
    clip: bool = False,
) -> tuple[nn.Sequential, Optimizer, list[float]]:
    """Returns model, optimizer and scales after the usual loop, with an inf in one gradient at `bad_step`."""
    model = linear_pair()
    optimizer = optimizer_of(model.parameters())
    scales = []
    for step, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if step == bad_step:
            poison(list(model.parameters())[2])
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, optimizer, scales


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Returns weights, gradients and optimizer state, in order."""
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *held]


class HostReads(TorchDispatchMode):
    """Counts the operations that synchronize with the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function._schema.name in HOST_READS
        return function(*args, **(kwargs or {}))


@contextmanager
def nothing_uninitialised() -> Iterator[None]:
    """Fills memory that torch leaves uninitialized with NaN, so that a use of it shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
