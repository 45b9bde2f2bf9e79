"""Generative models without an adversary: a VAE and a diffusion model."""

import math

import torch
from benchmarks.study.digits import PIXELS, DigitBatches, layers
from benchmarks.study.one_loss import Batch, OneLossTask
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

LATENT = 8
POINTS, TIMES = 128, 100


class AutoencoderTask(OneLossTask):
    """A VAE of digits. Its loss is summed over pixels and latent variables, and averaged over images."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            seed, lambda: nn.ModuleList([layers((PIXELS, 64, 2 * LATENT)), layers((LATENT, 64, PIXELS))]), 2e-3
        )
        self._digits = DigitBatches(seed, self.random)

    def batch(self) -> Batch:
        images, _ = self._digits.draw()
        return images, torch.randn(len(images), LATENT, generator=self.random)

    def loss(self, images: Tensor, noise: Tensor) -> Tensor:
        encoder, decoder = self.model.children()
        mean, log_variance = encoder(images).float().chunk(2, 1)
        pixels = decoder(mean + noise * (log_variance / 2).exp())
        error = binary_cross_entropy_with_logits(pixels, images, reduction="none").sum(1)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        return (error + divergence).mean()


class DiffusionTask(OneLossTask):
    """A DDPM of points on a spiral: predicts the noise that was added to them, at a random time."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: layers((2 + 4, 64, 64, 64, 2)), 1e-3)
        self._kept = (1 - torch.linspace(1e-3, 0.1, TIMES)).cumprod(0)

    def batch(self) -> Batch:
        turned = 3 * math.pi * torch.rand(POINTS, 1, generator=self.random).sqrt()
        points = turned / (2 * math.pi) * torch.cat([turned.cos(), turned.sin()], 1)
        noise = torch.randn(POINTS, 2, generator=self.random)
        times = torch.randint(TIMES, (POINTS, 1), generator=self.random)
        kept = self._kept[times]
        phases = times / TIMES * math.pi * torch.tensor([1.0, 4.0])
        noisy = kept.sqrt() * points + (1 - kept).sqrt() * noise
        return torch.cat([noisy, phases.sin(), phases.cos()], 1), noise

    def loss(self, inputs: Tensor, noise: Tensor) -> Tensor:
        return mse_loss(self.model(inputs), noise)
