"""A loop of Accelerate in FP16: one line before `prepare`, and the loop stays as it is."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradscale.integrations.accelerate import install

EPOCHS, BATCH = 8, 64

torch.manual_seed(0)
digits = load_digits()
pixels, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
loader = DataLoader(TensorDataset(pixels, labels), BATCH, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

accelerator = Accelerator(mixed_precision="fp16")
scaler = install(accelerator)  # the only line that is new
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

losses = []
for _ in range(EPOCHS):
    for batch, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()  # held if the step was skipped, though the optimizer is fused
            optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.log({"loss": losses[-1].item()})  # trackers get the scale, skips and norm with it

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {len(losses)} steps, scale {metrics['scale']:g}"
)
