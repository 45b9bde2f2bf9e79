"""Sharpness-aware minimization (SAM): two gradients per step, both true, from `scaler.closure`."""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, RADIUS = 100, 0.05

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
scaler = LossScaler(model)


def sam_step(closure: Callable[[], Tensor]) -> Tensor:
    """Steps with the gradient found uphill: at the worst point within `RADIUS`, to first order."""
    loss = closure()
    if scaler.last.skipped():  # no scale helped; a step on zero gradients would still decay weights and momentum
        return loss
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    length = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    uphill = [parameter.grad * (RADIUS / (length + 1e-12)) for parameter in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, uphill)
        closure()
        torch._foreach_sub_(parameters, uphill)
    if not scaler.last.skipped():
        optimizer.step()  # the gradients are true already: nothing is left to unscale
    return loss


losses = []
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), device=DEVICE)

    def evaluate(batch: Tensor = batch) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.float16):
            return nn.functional.cross_entropy(model(pixels[batch]), labels[batch])

    losses.append(sam_step(scaler.closure(evaluate, optimizer)))

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, skipped {metrics['skipped']:.0f} "
    f"of {metrics['applied'] + metrics['skipped']:.0f} evaluations, scale {metrics['scale']:g}"
)
