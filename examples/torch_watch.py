"""What every tensor of a model looks like, forward and backward, at some of the steps."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale.torch import LossScaler, watch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
scaler = LossScaler(model)
watched = watch(model, scaler, every=100)  # the scaler counts the steps; hooks are on the model at steps 0 and 100 only

losses = []
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    scaler.backward(loss)
    scaler.step(optimizer)
    optimizer.zero_grad()
    losses.append(loss.detach())

print(watched.table())
# Gradients are unscaled, whatever the scale was: `row.scale` says at which they passed through FP16.
gradients = [row for row in watched.rows() if row.kind == "output_grad"]
worst = max(gradients, key=lambda row: row.formats["FP16"].flushed)
print(f"most flushed: {worst.name} at step {worst.step}, {worst.formats['FP16'].flushed:.2%} at scale {worst.scale:g}")
metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
