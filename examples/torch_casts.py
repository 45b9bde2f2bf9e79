"""Functions with a precision of their own under autocast: one that overflows in FP16, a method, a loss."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from gradscale.torch import LossScaler, casts, float_function

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200


class Detector(nn.Module):
    """Tells whether points are outside of a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, points: Tensor) -> Tensor:
        distances = points.square().sum(dim=1, keepdim=True).sqrt()
        return self.body(torch.cat([points, distances], dim=1) / 300)


@float_function
def regularized(logits: Tensor, outside: Tensor) -> Tensor:
    """Returns the loss, in float32 from the first operation to the last."""
    return binary_cross_entropy_with_logits(logits, outside) + 1e-4 * logits.square().mean()


torch.manual_seed(0)
model = Detector().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scaler = LossScaler(model)
# The square of a coordinate above 256 is inf in FP16, which is what the model gets.
precisions = casts(half=[Detector.forward], float=[torch.square])
losses, skipped = [], 0

for _ in range(STEPS):
    points = 300 * torch.randn(128, 2, device=DEVICE)
    outside = (points.norm(dim=1, keepdim=True) > 300).float()
    with torch.autocast(DEVICE, dtype=torch.float16), precisions:
        loss = regularized(model(points), outside)
    scaler.backward(loss)
    result = scaler.step(optimizer)
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
    skipped += result.skipped()

try:
    with torch.autocast(DEVICE, dtype=torch.float16), casts():
        binary_cross_entropy(torch.sigmoid(model(points)), outside)
except RuntimeError as error:
    print(error)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, skipped {skipped} of {STEPS} steps, scale {float(result.scale):g}")
