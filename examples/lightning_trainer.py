"""A small network trained in FP16 by `lightning.Trainer`: the plugin is all that changes."""

import logging
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradscale.integrations.lightning import MixedPrecision

STEPS = 200
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
warnings.filterwarnings("ignore", ".*treespec, LeafSpec.* is deprecated")  # Lightning 2.6 with torch 2.13


class Digits(lightning.LightningModule):
    """Reads handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        pixels, labels = batch
        loss = nn.functional.cross_entropy(self.net(pixels), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.named_parameters(), lr=3e-3, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

plugin = MixedPrecision()  # was: Trainer(precision="16-mixed")
trainer = lightning.Trainer(
    plugins=[plugin],
    gradient_clip_val=1.0,  # with a fused optimizer: in its own kernel
    max_steps=STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Digits()
trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))

metrics = plugin.scaler.metrics()  # the Trainer has logged them, too: trainer.callback_metrics
print(
    f"loss {model.losses[0]:.3f} -> {torch.stack(model.losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:g} of {STEPS} steps, scale {metrics['scale']:g}"
)
