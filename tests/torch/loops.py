"""The same training loop with each scaler, so that one test can hold all of them to the same thing."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradscale import Dynamic
from gradscale.torch import GradScaler, LossScaler

Optimizer = torch.optim.Optimizer


class Loop(Protocol):
    """A scaler in the hands of a user who does everything right."""

    def __init__(self, model: nn.Module, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None: ...

    @property
    def scale(self) -> float:
        """The scale of the next loss."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Runs a scaled backward pass."""
        ...

    def step(self, *optimizers: Optimizer, clip: float | None = None, unscale: bool = False) -> bool | None:
        """Takes a step and updates the scale; returns whether it was applied, or None where that is not reported."""
        ...

    def save(self) -> dict[str, Any]:
        """Returns the scaler's state."""
        ...

    def load(self, saved: dict[str, Any]) -> None:
        """Takes over a saved state."""
        ...


class WithLossScaler:
    def __init__(self, model: nn.Module, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        policy = Dynamic(init_scale=init_scale, growth_interval=growth_interval, min_scale=2.0**-30)
        self.scaler = LossScaler(model, policy, on_stuck=lambda _: None)

    @property
    def scale(self) -> float:
        return self.scaler.loss_scale.item()

    def backward(self, loss: Tensor) -> None:
        self.scaler.backward(loss)

    def step(self, *optimizers: Optimizer, clip: float | None = None, unscale: bool = False) -> bool | None:
        if unscale:
            with self.scaler.unscaled(*optimizers):
                pass
        return self.scaler.step(*optimizers, clip_norm=clip).poll()

    def save(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        self.scaler.load_state_dict(saved)


class WithGradScaler:
    """The loop of torch's documentation, which the drop-in must take unchanged."""

    kind: type[torch.amp.GradScaler] = GradScaler

    def __init__(self, model: nn.Module, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.model = model
        self.scaler = self.kind("cpu", init_scale=init_scale, growth_interval=growth_interval)

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, *optimizers: Optimizer, clip: float | None = None, unscale: bool = False) -> bool | None:
        applied = []
        for optimizer in optimizers:
            if unscale or clip is not None:
                self.scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
            self.scaler.step(optimizer)
            applied.append(self._applied())
        self.scaler.update()
        return None if None in applied else all(applied)

    def _applied(self) -> bool | None:
        last = getattr(self.scaler, "last", None)
        return None if last is None else last.poll()

    def save(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        self.scaler.load_state_dict(saved)


LOOPS: dict[str, type[Loop]] = {"LossScaler": WithLossScaler, "GradScaler": WithGradScaler}
