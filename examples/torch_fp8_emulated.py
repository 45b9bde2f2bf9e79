"""FP8 on any machine: E4M3 values and E5M2 gradients, emulated, which die without a scale and live with one."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale import FP8_E4M3, FP8_E5M2, Headroom, Policy, Static
from gradscale.torch import LossScaler, emulate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 150

digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
targets = nn.functional.one_hot(torch.tensor(digits.target, device=DEVICE)).float()


def train(policy: Policy) -> tuple[list[torch.Tensor], LossScaler]:
    """Returns the losses of a run, and its scaler."""
    torch.manual_seed(0)
    layers = [layer for _ in range(7) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scaler = LossScaler(model, policy)
    losses: list[torch.Tensor] = []
    for _ in range(STEPS):
        batch = torch.randint(len(pixels), (256,), device=DEVICE)
        # Values beyond 448 become 448. Gradients beyond 57344 become inf, so that the scaler sees them.
        with emulate(FP8_E4M3, FP8_E5M2, saturate=True):
            logits = model(pixels[batch])
        loss = nn.functional.mse_loss(logits, targets[batch])
        scaler.backward(loss)
        scaler.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, scaler


for name, policy in (("unscaled", Static(1.0)), ("scaled", Headroom(format=FP8_E5M2))):
    losses, scaler = train(policy)
    metrics = scaler.metrics()
    print(
        f"{name}: loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
        f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
    )
