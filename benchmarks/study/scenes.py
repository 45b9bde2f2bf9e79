"""Small scenes with objects on a noisy ground: segmentation by a U-Net, and detection on a grid of cells."""

import math
from collections.abc import Iterator

import torch
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from torch import Generator, Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, interpolate, max_pool2d, smooth_l1_loss

SIDE, SCENES, MOST, KINDS = 16, 8, 3, 2
CELL = 4
CELLS = SIDE // CELL
RATE, CYCLE, SMOOTH = 1e-2, 200, 1.0


def scenes(random: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Returns images from 0 to 1, the masks of their objects, and the objects: kind, place and size.

    Each of up to three objects is a disc or a ring. One that is not there has the kind 0 and a size of 0.
    """
    shape = (SCENES, MOST)
    kinds = torch.randint(KINDS + 1, shape, generator=random)
    kinds[:, 0].clamp_(min=1)
    places = 2 + (SIDE - 4) * torch.rand(*shape, 2, generator=random)
    sizes = (1 + 1.5 * torch.rand(shape, generator=random)) * (kinds > 0)
    grid = torch.arange(SIDE) + 0.5
    distances = (grid - places[..., :1]).square()[..., None, :] + (grid - places[..., 1:]).square()[..., None]
    inside = distances < sizes[..., None, None].square()
    hole = (kinds == KINDS)[..., None, None] & (distances < 1)
    shown = (inside & ~hole).any(1).float()
    noise = 0.1 * torch.randn(SCENES, SIDE, SIDE, generator=random)
    images = (0.3 + 0.4 * shown + noise).clamp(0, 1)
    return images[:, None], shown[:, None], torch.cat([kinds[..., None], places, sizes[..., None]], 2)


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two halvings of the resolution, and back, with the features of each resolution joined to those that return."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolution(1, 8), _convolution(8, 16), _convolution(16, 16)])
        self.up = nn.ModuleList([_convolution(32, 8), _convolution(16, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        first, second, third = self.down.children()
        fine = first(images)
        middle = second(max_pool2d(fine, 2))
        x = third(max_pool2d(middle, 2))
        for layer, joined in zip(self.up.children(), (middle, fine), strict=True):
            x = layer(torch.cat([interpolate(x, scale_factor=2), joined], 1))
        return self.head(x)


class SegmentationTask(OneLossTask):
    """Finds the pixels of the objects, by the cross entropy of pixels and the dice loss of images.

    The learning rate falls to zero by a cosine, and is at its full height again every 200 steps.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, UNet, RATE)

    def turns(self, step: int) -> Iterator[Turn]:
        self.optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * (step % CYCLE) / CYCLE)) / 2
        yield from super().turns(step)

    def batch(self) -> Batch:
        images, masks, _ = scenes(self.random)
        return images, masks

    def loss(self, images: Tensor, masks: Tensor) -> Tensor:
        logits = self.model(images).float()
        chances = logits.sigmoid()
        both, either = (chances * masks).sum((1, 2, 3)), (chances + masks).sum((1, 2, 3))
        dice = (2 * both + SMOOTH) / (either + SMOOTH)
        return binary_cross_entropy_with_logits(logits, masks) + (1 - dice).mean()


def _detector() -> nn.Module:
    """Returns convolutions without norms, as in VGG, to the kinds and the box of each cell."""
    parts: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 1), (16, 16, 2), (16, 32, 1), (32, 32, 2)):
        parts += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.ReLU()]
    return nn.Sequential(*parts, nn.Conv2d(32, KINDS + 1 + 3, 3, padding=1))


class DetectionTask(OneLossTask):
    """Finds the kind, the place and the size of the object in each cell, by the cross entropy and the smooth L1 loss.

    Both are summed over cells and divided by the number of objects, as in SSD. Some batches have pixels from 0 to 255.

    Args:
        seed: of the weights and the batches.
        bad_share: share of the batches that are bad.
    """

    def __init__(self, seed: int, bad_share: float) -> None:
        super().__init__(seed, _detector, 1e-3)
        self._bad_share, self._score = bad_share, 0.0

    def batch(self) -> Batch:
        images, _, objects = scenes(self.random)
        targets = torch.zeros(SCENES, CELLS, CELLS, 4)
        for index in range(MOST):  # of two in one cell the last one counts
            there = objects[:, index, 0] > 0
            kinds, places, sizes = objects[there, index].split([1, 2, 1], 1)
            cells = (places / CELL).long()
            offsets = places / CELL - cells
            targets[there.nonzero()[:, 0], cells[:, 1], cells[:, 0]] = torch.cat([kinds, offsets, sizes / CELL], 1)
        return images, targets

    def turns(self, step: int) -> Iterator[Turn]:
        images, targets = self.batch()
        with torch.no_grad():
            self._score = float(self.loss(images, targets))
        bad = float(torch.rand((), generator=self.random)) < self._bad_share
        given = images * (255.0 if bad else 1.0)
        yield Turn(self.optimizer, lambda: self.loss(given, targets), bad=bad)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        kinds, boxes = self.model(images).float().permute(0, 2, 3, 1).split([KINDS + 1, 3], 3)
        wanted = targets[..., 0].long()
        there = wanted > 0
        errors = cross_entropy(kinds.flatten(0, 2), wanted.flatten(), reduction="sum")
        return (errors + smooth_l1_loss(boxes[there], targets[..., 1:][there], reduction="sum")) / there.sum()

    def score(self, losses: list[float]) -> float:
        """Returns the loss of the images with pixels from 0 to 1, before the step."""
        return self._score
