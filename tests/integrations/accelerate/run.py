"""A training run of a small network under Accelerate, on the CPU and in FP16 unless told otherwise."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradscale.integrations.accelerate import install

Place = Callable[[Accelerator], Any]
"""Puts a scaler into an accelerator, and returns it."""


def ours(policy: Any = "torch:init_scale=1024.0", **kwargs: Any) -> Place:
    """Returns what installs gradscale's scaler."""
    return lambda accelerator: install(accelerator, policy, **kwargs)


def torchs(init_scale: float = 1024.0, **kwargs: Any) -> Place:
    """Returns what puts torch's scaler where Accelerate has it on a GPU."""

    def place(accelerator: Accelerator) -> Any:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale, **kwargs)
        accelerator.native_amp = True
        return accelerator.scaler

    return place


class Run:
    """A training run.

    Attributes:
        types: of the outputs of the first layer.
        losses: of the micro-batches.
        norms: of the gradients, as `clip_grad_norm_` returned them.
        skips: whether a step was skipped, as Accelerate reports it.
    """

    def __init__(
        self,
        place: Place,
        *,
        fused: bool = False,
        accumulate: int = 1,
        clip: float | None = 1.0,
        mixed_precision: str = "fp16",
        **kwargs: Any,
    ) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulate, **kwargs
        )
        self.scaler = place(self.accelerator)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
        x = torch.randn(64, 8)
        data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
        self.types: set[torch.dtype] = set()
        model[0].register_forward_hook(lambda module, args, out: self.types.add(out.dtype))
        prepared = self.accelerator.prepare(model, optimizer, data, scheduler)
        self.model, self.optimizer, self.data, self.scheduler = prepared
        self.clip = clip
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skips: list[bool] = []

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def schedule_steps(self) -> int:
        return self.scheduler.scheduler.last_epoch

    def train(self, epochs: int, bad_steps: Sequence[int] = ()) -> "Run":
        """Trains for 4 batches an epoch; the loss of those in `bad_steps` is not finite."""
        for x, y in (batch for _ in range(epochs) for batch in self.data):
            with self.accelerator.accumulate(self.model):
                self._step(x, y, bad=len(self.losses) in bad_steps)
        return self

    def _step(self, x: Tensor, y: Tensor, *, bad: bool) -> None:
        loss = nn.functional.mse_loss(self.model(x), y * torch.inf if bad else y)
        self.losses.append(loss.item())
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients and self.clip is not None:
            norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
            self.norms.append(float(norm))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.skips.append(self.accelerator.optimizer_step_was_skipped)
