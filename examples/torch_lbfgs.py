"""LBFGS calls the loss itself, several times per step: `scaler.closure` gives it true gradients each time."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 8

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=DEVICE)
labels = torch.tensor(digits.target, device=DEVICE)

model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).to(DEVICE)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
scaler = LossScaler(model)


def evaluate() -> Tensor:
    # No scaling, no backward pass, no zero_grad here: the closure does all three.
    with torch.autocast(DEVICE, dtype=torch.float16):
        return nn.functional.cross_entropy(model(pixels), labels)


losses = [optimizer.step(scaler.closure(evaluate, optimizer)) for _ in range(STEPS)]

metrics = scaler.metrics()
print(
    f"loss {losses[0]:.3f} -> {losses[-1]:.5f}, skipped {metrics['skipped']:.0f} "
    f"of {metrics['applied'] + metrics['skipped']:.0f} evaluations, scale {metrics['scale']:g}"
)
