"""The best static scale, found in float32. In this folder also: `gradscale calibrate torch_calibrate:parts`."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscale import Static
from gradscale.torch import LossScaler, calibrate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def parts():
    """Returns a model, batches and the loss."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
    labels = torch.tensor(digits.target, device=DEVICE)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(DEVICE)
    chosen = (torch.randint(len(pixels), (64,), device=DEVICE) for _ in range(STEPS))
    return model, [(pixels[rows], labels[rows]) for rows in chosen], loss_of


if __name__ == "__main__":
    model, batches, loss_fn = parts()
    found = calibrate(model, batches[:20], loss_fn)
    print(found)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scaler = LossScaler(model, Static(found.scale))
    losses = []
    for batch in batches:
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = loss_fn(model, batch)
        scaler.backward(loss)
        scaler.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.detach())
    metrics = scaler.metrics()
    print(
        f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
        f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
    )
