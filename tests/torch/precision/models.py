"""Models and losses that the tests of precisions share."""

from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch import Precision, prepare


class Net(nn.Module):
    """A small CNN with a norm of every kind that has weights, a buffer, and a dict for an output."""

    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norms = nn.Sequential(nn.BatchNorm2d(8), nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8))
        self.body = nn.ModuleList([nn.Linear(288, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)])
        self.head = nn.Linear(8, 4)
        self.register_buffer("position", torch.linspace(-1, 1, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        hidden = (self.norms(self.conv(x)) + self.position[:, None, None]).relu().flatten(1)
        for part in self.body:
            hidden = part(hidden)
        return {"logits": self.head(hidden), "hidden": hidden}


NORMS = ("norms.0", "norms.1", "norms.2", "body.1", "body.3")
HALF_MODULES = ("conv", "body.0", "body.2", "head")


def images(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (32,), generator=generator)
    noise = torch.randn(32, 1, 8, 8, generator=generator)
    ramp = torch.arange(8.0).expand(8, 8) / 8
    patterns = torch.stack([ramp, ramp.T, (ramp * 8).sin(), (ramp.T * 8).cos()])
    return 0.3 * noise + patterns[labels][:, None], labels


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x, labels = images(seed)
    return nn.functional.cross_entropy(model(x)["logits"], labels)


def dtypes(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Returns the dtypes of the floating-point weights and buffers of each module that has any of its own."""
    held = {
        name: [*part.parameters(recurse=False), *part.buffers(recurse=False)] for name, part in model.named_modules()
    }
    return {
        name: {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        for name, tensors in held.items()
        if tensors
    }


def train(model: nn.Module, optimizer: Any, scaler: Any, steps: int) -> list[float]:
    """Returns the losses of some steps, each on new images."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        scaler.backward(loss)
        scaler.step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def prepared(precision: Precision | str, model: Any = None) -> Any:
    """Returns model, optimizer and scaler of a precision."""
    model = Net() if model is None else model
    return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), precision)
