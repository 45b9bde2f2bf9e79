"""A GAN: two optimizers that take turns, one scaler. The generator learns a ring of points."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from gradscale.torch import LossScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, BATCH = 600, 128


def real_points() -> Tensor:
    angle = 2 * math.pi * torch.rand(BATCH, device=DEVICE)
    return torch.stack([angle.cos(), angle.sin()], dim=1) * 2


def mlp(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(32, outputs)).to(DEVICE)


@torch.no_grad()
def distance() -> float:
    """Returns how far the generated points are from the ring, on average."""
    return float((generator(test_noise).norm(dim=1) - 2).abs().mean())


torch.manual_seed(0)
generator, critic = mlp(8, 2), mlp(2, 1)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9), fused=True)
scaler = LossScaler([generator, critic])
test_noise = torch.randn(512, 8, device=DEVICE)
before = distance()

for _ in range(STEPS):
    noise = torch.randn(BATCH, 8, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        fake = generator(noise)
        on_real, on_fake = critic(real_points()), critic(fake.detach())
    # The losses are float32: softplus of FP16 logits would round small losses away.
    scaler.backward(softplus(-on_real.float()).mean() + softplus(on_fake.float()).mean())
    scaler.step(critic_optimizer)
    critic_optimizer.zero_grad()

    with torch.autocast(DEVICE, dtype=torch.float16):
        verdict = critic(fake)
    scaler.backward(softplus(-verdict.float()).mean())
    scaler.step(generator_optimizer)
    generator_optimizer.zero_grad()
    critic_optimizer.zero_grad()  # the generator's backward pass went through the critic and filled its gradients

metrics = scaler.metrics()
print(
    f"distance from the ring {before:.3f} -> {distance():.3f}, "
    f"skipped {metrics['skipped']:.0f} of {2 * STEPS} steps, scale {metrics['scale']:g}"
)
