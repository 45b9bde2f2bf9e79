"""A loop written for `torch.amp.GradScaler`: the import is all that changes, and `scaler.last` tells what happened."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale.torch import GradScaler  # was: from torch.amp import GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
# Given with their names, the parameters that overflow can be named.
optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
scaler = GradScaler(DEVICE)

losses, skipped = [], 0
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    optimizer.zero_grad()
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.detach())
    if scaler.last.skipped():  # with a fused optimizer this would wait for the device; `last.poll()` never does
        skipped += 1
        culprits = ", ".join(f"{culprit.name} ({culprit.kind})" for culprit in scaler.last.culprits())
        print(f"step {len(losses)} overflowed at scale {scaler.last.scale:g}: {culprits}")

# A checkpoint of this scaler is one of torch's, and the other way round.
torch.amp.GradScaler(DEVICE).load_state_dict(scaler.state_dict())
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {skipped} of {STEPS} steps, scale {scaler.get_scale():g}"
)
