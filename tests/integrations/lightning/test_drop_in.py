"""The drop-in inside Lightning: real training runs in FP16 on the CPU.

`Trainer(precision="16-mixed")` falls back to BF16 on the CPU; the plugin given directly runs FP16 there too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch.helpers import poison
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradscale.torch import GradScaler

lightning = pytest.importorskip("lightning")
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings(r"ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings(r"ignore:The number of training batches \(4\) is smaller than the logging interval"),
]


class Regression(lightning.LightningModule):
    """A small network; its gradients overflow at the given steps."""

    def __init__(self, fused: bool = False, bad_steps: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.fused, self.bad_steps, self.steps = fused, bad_steps, 0
        self.types: set[torch.dtype] = set()
        self.losses: list[float] = []
        self.skips: list[bool] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        out = self.net(batch[0])
        self.types.add(out.dtype)
        loss = nn.functional.mse_loss(out.float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        if self.steps in self.bad_steps:
            poison(next(self.net.parameters()))
        self.steps += 1

    def on_train_batch_end(self, *_: Any) -> None:
        last = getattr(self.trainer.precision_plugin.scaler, "last", None)
        self.skips.append(last is not None and last.skipped())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-2, fused=self.fused)


def fit(module: Any, scaler: Any, epochs: int = 4, ckpt_path: Path | None = None, **kwargs: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        **kwargs,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("fused", [False, True])
def test_training_in_fp16_learns_and_a_skipped_step_is_reported(fused: bool) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    module = Regression(fused, bad_steps=(5,))
    clipping: dict[str, Any] = {} if fused else {"gradient_clip_val": 1.0}
    fit(module, scaler, **clipping)
    assert module.types == {torch.float16}
    assert module.losses[-1] < 0.5 * module.losses[0]
    assert [index for index, skipped in enumerate(module.skips) if skipped] == [5]
    assert scaler.get_scale() == 2.0**10 * 2 / 2 * 4
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_checkpoint_holds_the_scaler_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=6, hysteresis=2)
    trainer = fit(Regression(bad_steps=(3,)), scaler, epochs=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["MixedPrecision"]
    assert saved == scaler.state_dict()
    resumed = GradScaler("cpu")
    fit(Regression(bad_steps=(0,)), resumed, epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert resumed.get_scale() == 128.0, "the second overflow of two, one of them before the checkpoint"


def test_checkpoint_of_a_run_with_torchs_scaler_is_taken_over(tmp_path: Path) -> None:
    trainer = fit(Regression(), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3), epochs=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    scaler = GradScaler("cpu")
    fit(Regression(), scaler, epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert scaler.get_scale() == 256.0 * 2**2
    assert scaler.get_growth_interval() == 3


class TwoOptimizers(lightning.LightningModule):
    """Two parameters with an optimizer each, stepped by hand on one backward pass; the first overflows at once."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = (nn.Parameter(torch.ones(2)) for _ in range(2))
        self.weights: list[list[float]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward((self.first + self.second).sum())
        if index == 0:
            poison(self.first)
        for optimizer in optimizers:
            optimizer.step()
        self.weights.append([self.first[1].item(), self.second[1].item()])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([each], lr=1.0) for each in (self.first, self.second)]


def test_two_optimizers_on_one_backward_pass_are_unscaled_alike() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    module = TwoOptimizers()
    fit(module, scaler, epochs=1)
    assert module.weights == [[1.0, 0.0], [0.0, -1.0], [-1.0, -2.0], [-2.0, -3.0]]
    assert scaler.get_scale() == 8.0, "halved once, and doubled once after two clean steps"
