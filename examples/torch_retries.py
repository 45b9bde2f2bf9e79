"""No batch is lost: an overflow runs the backward pass, and only that, again at a lower scale."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale import Dynamic
from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
# A classic rule that starts high and probes upwards every 20 steps: each probe that goes too far is an overflow.
scaler = LossScaler(model, Dynamic(init_scale=2.0**24, growth_interval=20))

losses, retries = [], 0
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    # Worth it where a batch costs far more than a backward pass: rollouts, long accumulation, rare data. The price is
    # one look at the gradients per attempt, and memory: activations are freed when the pass has ended.
    scaler.backward(loss, retries=12)
    result = scaler.step(optimizer)
    optimizer.zero_grad()
    retries += result.retries
    losses.append(loss.detach())

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, {retries} retries, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
