"""A gradient penalty: `scaler.grad` returns true gradients, which become part of the loss."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, WEIGHT = 150, 0.1

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
scaler = LossScaler(model)

losses = []
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    inputs = pixels[batch].requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.float16):
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs.float(), labels[batch], reduction="sum")
    # Computed on the scaled loss, so that nothing underflows on the way, and then divided by the scale: the penalty
    # must be made from true gradients, or it would change whenever the scale does.
    (slope,) = scaler.grad(loss, inputs, create_graph=True)
    penalty = slope.square().sum(dim=1).mean()
    loss = loss / len(batch)
    scaler.backward(loss + WEIGHT * penalty)
    scaler.step(optimizer)
    optimizer.zero_grad()
    losses.append(loss.detach())

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"penalty at the end {penalty:.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
