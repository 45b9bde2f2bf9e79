"""FP16 weights that lose no update: master weights, stored as 16 bits beside each weight or in float32."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale.torch import LossScaler, MasterWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 150

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float16, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE).half()
# "remainder" keeps 2 bytes beside each weight, where "fp32" keeps 4: together they are the same float32 masters.
optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), storage="remainder")
# Built on the `MasterWeights`, not on its inner optimizer: that is where the settings are.
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
scaler = LossScaler(model)
guard = scaler.guard(scheduler)

losses = []
for step in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    loss = nn.functional.cross_entropy(model(pixels[batch]).float(), labels[batch])
    scaler.backward(loss)
    scaler.step(optimizer, clip_norm=1.0)  # casts, unscales, clips and steps part by part, and rounds into the weights
    optimizer.zero_grad()
    guard.step()
    losses.append(loss.detach())
    if step == STEPS // 2:
        # A checkpoint. Another storage, such as "fp32", can resume from it: the masters are saved in float32.
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

resumed = copy.deepcopy(model)
resumed.load_state_dict(saved["model"])
other = MasterWeights(torch.optim.AdamW(resumed.parameters(), fused=True))
other.load_state_dict(saved["optimizer"])
loaded = sum(value.numel() for _, value in other.masters())

metrics = scaler.metrics()
print(
    f"{loaded} masters loaded, loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
