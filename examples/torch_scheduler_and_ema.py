"""A learning-rate schedule and averaged weights that do not count steps which never happened."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradscale import Dynamic
from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
scheduler = CosineAnnealingLR(optimizer, T_max=STEPS)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)

# Starts too high on purpose: the first steps overflow and are skipped.
scaler = LossScaler(model, Dynamic(init_scale=2.0**24))
# BatchNorm updates its statistics in the forward pass; a skipped step must not leave its traces there.
scaler.protect_buffers(model)
# "hold" keeps the schedule in step with the weights. With "advance" it would follow the number of batches instead.
guard = scaler.guard(scheduler, lambda: ema.update_parameters(model), on_skip="hold")

losses, advanced = [], 0
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    scaler.backward(loss)
    scaler.step(optimizer)
    optimizer.zero_grad()
    advanced += guard.step()
    losses.append(loss.detach())

ema.eval()
accuracy = (ema(pixels).argmax(dim=1) == labels).float().mean()
metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, schedule advanced {advanced} times, "
    f"accuracy of the average {accuracy:.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
