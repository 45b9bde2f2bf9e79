"""A layer that overflows FP16 is found by a probe and kept in float32. Then it trains, and its health is shown."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from gradscale.torch import LossScaler, Verdict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200


class Pooled(nn.Module):
    """Multiplies features before it sums them up: fine in float32, and above 65504 in FP16."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.wide = wide
        self.mix = nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.float16, enabled=not self.wide):
            energy = self.mix(x.float() if self.wide else x).mul(2000.0).square()
            return (energy * 1e-7 + 1e-9).sqrt()


torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(Pooled(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
scaler = LossScaler(model)


def loss_of(batch: Tensor) -> Tensor:
    with torch.autocast(DEVICE, dtype=torch.float16):
        return nn.functional.cross_entropy(model(pixels[batch]), labels[batch])


first = torch.arange(64, device=DEVICE)
report = scaler.probe(lambda: loss_of(first))
assert report.verdict is Verdict.FORWARD_OVERFLOW
assert report.operation is not None
print(f"{report.verdict} in {report.operation.name}, module {report.operation.module}")
print(f"at {report.operation.source.text}" if report.operation.source else "")

model[0].wide = True  # what the report advises
losses = []
for _ in range(STEPS):
    loss = loss_of(torch.randint(len(pixels), (64,), device=DEVICE))
    scaler.backward(loss)
    scaler.step(optimizer, clip_norm=1.0)
    optimizer.zero_grad()
    losses.append(loss.detach())

print(scaler.health())
metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
)
