"""Small modules and runs that the tests of the Trainer share."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from tests.torch.helpers import poison
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradscale.integrations.lightning import MixedPrecision
from gradscale.torch import GradScaler

BATCH = 16

KINDS = ["foreach", "fused"]
"""Of optimizers."""


class Regression(L.LightningModule):
    """A small network that keeps what it sees; its gradients overflow at the given batches."""

    def __init__(self, optimizer: str = "foreach", bad: tuple[int, ...] = (), interval: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.kind, self.bad, self.interval, self.frequency = optimizer, bad, interval, 1
        self.batches = 0
        self.types: set[torch.dtype] = set()
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        out = self.net(batch[0])
        self.types.add(out.dtype)
        loss = nn.functional.mse_loss(out.float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        if self.batches in self.bad:
            poison(next(self.net.parameters()))
        self.batches += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        how: dict[str, Any] = {self.kind: True}
        optimizer = torch.optim.AdamW(self.parameters(), lr=2.0**-5, **how)
        if self.interval is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        config = {"scheduler": schedule, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


def data(batches: int = 4) -> DataLoader[Any]:
    x = torch.randn(BATCH * batches, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)


def ours(**kwargs: Any) -> MixedPrecision:
    """Returns the plugin with a scale that the tests know."""
    return MixedPrecision(scaler=GradScaler("cpu", init_scale=2.0**10, growth_interval=4), **kwargs)


def scaler_in(plugin: MixedPrecision) -> GradScaler:
    assert plugin.scaler is not None
    return plugin.scaler


def theirs() -> LightningMixedPrecision:
    """Returns Lightning's plugin with torch's scaler, and the same settings."""
    return LightningMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**10, growth_interval=4))


def trainer_of(plugin: Any, **kwargs: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given = {"max_epochs": 1, "accelerator": "cpu", "enable_model_summary": False, **quiet, **kwargs}
    return L.Trainer(**given, plugins=[] if plugin is None else [plugin])


def fit(module: L.LightningModule, plugin: Any, *, batches: int = 4, ckpt_path: Any = None, **kwargs: Any) -> L.Trainer:
    trainer = trainer_of(plugin, **kwargs)
    trainer.fit(module, data(batches), ckpt_path=ckpt_path)
    return trainer


def weights_of(module: nn.Module) -> list[float]:
    return [number for parameter in module.parameters() for number in parameter.flatten().tolist()]
