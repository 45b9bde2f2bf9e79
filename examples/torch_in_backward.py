"""Optimizers stepped in the backward pass: gradients never exist all at once."""

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
# One for each parameter, so that each can be stepped alone.
optimizers = [torch.optim.AdamW([parameter], lr=3e-3, fused=True) for parameter in model.parameters()]
scaler = LossScaler(model)
scaler.step_in_backward(*optimizers)

losses = []
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    scaler.backward(loss)  # checks, unscales, applies and clears each gradient, then moves the scale
    losses.append(loss.detach())  # `scaler.last` is the result of the step

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
