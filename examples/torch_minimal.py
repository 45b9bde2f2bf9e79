"""The smallest loop: FP16 autocast, float32 parameters, and two lines for the scale."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
# A fused optimizer takes the scale and the skip into its own kernel, so that `step` does not wait for the device.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
scaler = LossScaler(model)

losses = []
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    scaler.backward(loss)
    result = scaler.step(optimizer, clip_norm=1.0)  # unscales, checks, clips, steps or skips, moves the scale
    optimizer.zero_grad()
    losses.append(loss.detach())  # kept on the device: `.item()` here would wait for it at every step

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
