"""Clipping layer by layer, and noise, as in private training: `scaler.unscaled` shows true gradients to your code."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, LAYER_NORM, NOISE = 200, 0.5, 1e-3

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
scaler = LossScaler(model)


@torch.no_grad()
def clip_and_blur(layer: nn.Module) -> None:
    """Bounds the norm of one layer's gradient, then adds noise to it."""
    nn.utils.clip_grad_norm_(layer.parameters(), LAYER_NORM)
    for parameter in layer.parameters():
        parameter.grad += NOISE * torch.randn_like(parameter)


losses = []
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
    scaler.backward(loss)
    with scaler.unscaled(optimizer):
        # Here `.grad` is in true units. Outside, a bound of 0.5 would be compared with gradients thousands of times
        # too large, and every step would be clipped. An overflow found on entry still skips the step below.
        for layer in model:
            if isinstance(layer, nn.Linear):
                clip_and_blur(layer)
    scaler.step(optimizer)
    optimizer.zero_grad()
    losses.append(loss.detach())

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
