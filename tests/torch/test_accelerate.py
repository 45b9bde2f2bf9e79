"""The drop-in inside Accelerate: real training runs in FP16 on the CPU.

Accelerate makes no scaler on the CPU, and takes none as an argument: `accelerator.scaler` is set before `prepare`, and
with it `native_amp`, by which it knows that there is something to unscale before it clips.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradscale.torch import GradScaler

pytestmark = pytest.mark.cpu_only("Accelerate chooses the device itself")

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in the class, so one test would see what another has set."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Run:
    """A training run of a small network under Accelerate."""

    def __init__(self, scaler: Any, fused: bool = False, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision="fp16", gradient_accumulation_steps=accumulate
        )
        self.accelerator.scaler = scaler
        self.accelerator.native_amp = True
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.types: set[torch.dtype] = set()
        model[0].register_forward_hook(lambda module, args, out: self.types.add(out.dtype))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
        x = torch.randn(64, 8)
        data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
        self.model, self.optimizer, self.data, self.scheduler = self.accelerator.prepare(
            model, optimizer, data, scheduler
        )
        self.losses: list[float] = []
        self.skips: list[bool] = []
        self.noticed: list[bool] = []

    def train(self, epochs: int, bad_steps: tuple[int, ...] = ()) -> None:
        for x, y in (batch for _ in range(epochs) for batch in self.data):
            with self.accelerator.accumulate(self.model):
                self._step(x, y, bad=len(self.losses) in bad_steps)

    def _step(self, x: Tensor, y: Tensor, *, bad: bool) -> None:
        loss = nn.functional.mse_loss(self.model(x), y)
        self.losses.append(loss.item())
        self.accelerator.backward(loss)
        if bad:
            self.model[0].weight.grad.fill_(torch.inf)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.skips.append(self.accelerator.scaler.last.skipped())
            self.noticed.append(self.accelerator.optimizer_step_was_skipped)


def test_training_in_fp16_learns_and_accelerate_sees_the_skipped_step() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    run = Run(scaler)
    run.train(epochs=4, bad_steps=(5,))
    assert run.types == {torch.float16}
    assert run.losses[-1] < 0.5 * run.losses[0]
    assert [index for index, skipped in enumerate(run.skips) if skipped] == [5]
    assert run.noticed == run.skips
    assert run.scheduler.scheduler._step_count - 1 == 15, "the schedule is held while a step is skipped"
    assert scaler.get_scale() == 2.0**10 * 2 / 2 * 4


def test_skip_of_a_fused_optimizer_is_reported_where_accelerate_cannot_see_it() -> None:
    run = Run(GradScaler("cpu", init_scale=2.0**10), fused=True)
    run.train(epochs=2, bad_steps=(5,))
    assert [index for index, skipped in enumerate(run.skips) if skipped] == [5]
    assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())


def test_overflow_in_one_micro_batch_skips_its_whole_window() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**10)
    run = Run(scaler, accumulate=2)
    run.train(epochs=2, bad_steps=(2,))
    assert run.skips == [False, True, False, False]
    assert scaler.get_scale() == 2.0**9


def test_saved_run_goes_on_with_its_scale(tmp_path: Path) -> None:
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=100, hysteresis=2)
    run = Run(scaler)
    run.train(epochs=1, bad_steps=(1,))
    saved = scaler.state_dict()
    run.accelerator.save_state(tmp_path)
    run.train(epochs=1, bad_steps=(5, 6))
    assert scaler.get_scale() == 64.0
    run.accelerator.load_state(tmp_path)
    assert scaler.state_dict() == saved
    assert scaler.get_scale() == 256.0


def test_two_optimizers_on_one_backward_pass_are_unscaled_alike() -> None:
    """Accelerate unscales both before it clips, and calls `update` after each `step`."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler, accelerator.native_amp = GradScaler("cpu", init_scale=8.0), True
    parts = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for part in parts:
        nn.init.ones_(part.weight)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in parts]
    first, second, *optimizers = accelerator.prepare(*parts, *optimizers)
    for clips in (False, True):
        with torch.no_grad():
            second.weight.fill_(1.0)
        accelerator.backward((first.weight.sum() + second.weight.sum()) * 1.0)
        first.weight.grad[0, 0] = torch.inf
        if clips:
            accelerator.clip_grad_norm_(second.parameters(), 100.0)
        for optimizer in optimizers:
            optimizer.step()
        assert first.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert second.weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert accelerator.scaler.get_scale() == 2.0
