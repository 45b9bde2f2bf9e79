"""A small vision transformer, with a learning rate that falls to zero by a cosine."""

import math
from collections.abc import Iterator

import torch
from benchmarks.study.digits import CLASSES, DigitBatches
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

WIDTH, HEADS, DEPTH, PATCH = 32, 4, 2, 2
PATCHES = (8 // PATCH) ** 2
RATE, STEPS = 2e-3, 600


class Block(nn.Module):
    """Attention between all patches, then two layers on each, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.queries_keys_values, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.queries_keys_values(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.mix(scaled_dot_product_attention(*joined).transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(self.norms[1](x))))


class VisionTransformer(nn.Module):
    """Classifies an image by the mean over its patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(PATCHES, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2)
        return self.head(self.blocks(patches + self.positions).mean(1))


class TransformerTask(OneLossTask):
    """Classifies digits."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, VisionTransformer, RATE)
        self._digits = DigitBatches(seed, self.random)

    def turns(self, step: int) -> Iterator[Turn]:
        self.optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        yield from super().turns(step)

    def batch(self) -> Batch:
        return self._digits.draw()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(images), labels)
