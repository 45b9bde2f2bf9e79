"""A loop of one's own with `lightning.Fabric` in FP16: clipped in the step, and saved with its scaler."""

import logging
import tempfile

import torch
from lightning import Fabric
from sklearn.datasets import load_digits
from torch import nn

from gradscale.integrations.lightning import FabricMixedPrecision

STEPS = 200
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

plugin = FabricMixedPrecision(clip_norm=1.0)  # was: Fabric(precision="16-mixed")
fabric = Fabric(devices=1, plugins=[plugin])
fabric.launch()

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=fabric.device)
labels = torch.tensor(digits.target, device=fabric.device)

net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

losses = []
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=fabric.device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    fabric.backward(loss)
    optimizer.step()
    if plugin.scaler.last.poll() is not False:  # a skipped step holds the schedule; `poll` never waits for the device
        scheduler.step()
    fabric.log_dict(plugin.metrics())
    losses.append(loss.detach())

with tempfile.TemporaryDirectory() as folder:
    fabric.save(f"{folder}/run.ckpt", {"model": model, "optimizer": optimizer})  # and the scaler
    fabric.load(f"{folder}/run.ckpt", {"model": model, "optimizer": optimizer})

metrics = plugin.scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:g} of {STEPS} steps, scale {metrics['scale']:g}"
)
