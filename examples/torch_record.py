"""A run that records itself, with a progress bar that shows the scale and the skips."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import trange

from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
path = Path(tempfile.mkdtemp()) / "run.jsonl"
# A file, and a function that gets each step as a row. A `SummaryWriter` or a run of W&B may stand in its place.
rows: list[dict[str, float]] = []
scaler = LossScaler(model, policy="torch:init_scale=2**20", record=[path, lambda row, step: rows.append(row)])

losses, bar = [], trange(STEPS)
for _ in bar:
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    scaler.note(loss=loss, lr=optimizer.param_groups[0]["lr"])
    scaler.backward(loss)
    scaler.step(optimizer, clip_norm=1.0)
    optimizer.zero_grad()
    losses.append(loss.detach())
    bar.set_postfix_str(scaler.summary(), refresh=False)  # scale 2^14, 3 skipped
    # With rich: progress.update(task, description=scaler.summary())

print(f"recorded in {path}; the first row: {rows[0]}")
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {scaler.metrics()['skipped']:g} of {STEPS} steps, {scaler.summary()}"
)
