"""Gradient accumulation: many backward passes, one step. The whole window shares one scale."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, MICRO_BATCHES = 80, 4

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
scaler = LossScaler(model)

losses = []
for _ in range(STEPS):
    total = torch.zeros((), device=DEVICE)
    for _ in range(MICRO_BATCHES):
        batch = torch.randint(len(pixels), (32,), device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch]) / MICRO_BATCHES
        # The scale moves in `step` only, so these gradients can be added up: all were made with the same one.
        scaler.backward(loss)
        total += loss.detach()
    result = scaler.step(optimizer, clip_norm=1.0)  # clips the sum, as one large batch would be
    optimizer.zero_grad()  # once per window, after a skipped step too
    losses.append(total)

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-10:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
