"""One call for the whole recipe: half weights, float32 norms, master weights, input/output casts, and the scaler."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale.torch import explain, prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
model, optimizer, scaler = prepare(model, optimizer, "O2")  # or "O0", "O1", "O3", "bf16", ...: the loop stays the same

losses = []
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])  # float32 in, float32 out, FP16 in between
    scaler.backward(loss)
    scaler.step(optimizer, clip_norm=1.0)
    optimizer.zero_grad()
    losses.append(loss.detach())

print(explain(model, optimizer, scaler))
metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
