"""Two losses of one network: the digit that an image shows, and the image itself."""

from collections.abc import Iterator

import torch
from benchmarks.study.digits import BATCH_SIZE, CLASSES, PIXELS, DigitBatches, layers
from benchmarks.study.task import Turn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

WIDTH, RATE = 64, 1e-3


class TwoHeads(nn.Module):
    """Layers that both losses share, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(layers((PIXELS, WIDTH, WIDTH)), nn.ReLU())
        self.classifier = nn.Linear(WIDTH, CLASSES)
        self.decoder = layers((WIDTH, WIDTH, PIXELS))

    def classification(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of the digits."""
        return cross_entropy(self.classifier(self.trunk(images)), labels)

    def reconstruction(self, images: Tensor) -> Tensor:
        """Returns the loss of the pixels."""
        return mse_loss(self.decoder(self.trunk(images)), images)


class WeightedTask:
    """Adds both losses, with weights that are far apart.

    Args:
        seed: of the weights and the batches.
        weights: of the losses of digits and of pixels.
    """

    def __init__(self, seed: int, weights: tuple[float, float]) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = TwoHeads()
        self._weights, self._score = weights, 0.0
        self._digits = DigitBatches(seed, torch.Generator().manual_seed(seed))
        self._optimizer = torch.optim.Adam(self.model.parameters(), RATE, eps=1e-16, foreach=True)

    def turns(self, step: int) -> Iterator[Turn]:
        images, labels = self._digits.draw()
        yield Turn(self._optimizer, lambda: self._loss(images, labels), max(self._weights))

    def score(self, losses: list[float]) -> float:
        """Returns the sum of both losses without their weights."""
        return self._score

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(self.model, TwoHeads)
        digits, pixels = self.model.classification(images, labels), self.model.reconstruction(images)
        self._score = float((digits + pixels).detach())
        return self._weights[0] * digits + self._weights[1] * pixels


class InTurnsTask:
    """Trains by the pixels for some steps and by the digits for as many, again and again.

    The loss of the pixels is averaged over all of them, and that of the digits summed over the batch: the gradients of
    the second are larger by orders of magnitude.

    Args:
        seed: of the weights and the batches.
        block: steps with the same loss.
    """

    def __init__(self, seed: int, block: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = TwoHeads()
        self._block, self._factor = block, 1.0
        self._digits = DigitBatches(seed, torch.Generator().manual_seed(seed))
        # One for each loss, since Adam adapts to the size of the gradients.
        self._optimizers = [torch.optim.Adam(self.model.parameters(), RATE, foreach=True) for _ in range(2)]

    def turns(self, step: int) -> Iterator[Turn]:
        model, (images, labels) = self.model, self._digits.draw()
        assert isinstance(model, TwoHeads)
        large = step // self._block % 2 == 1
        self._factor = BATCH_SIZE if large else 1.0
        if large:
            yield Turn(self._optimizers[1], lambda: model.classification(images, labels) * BATCH_SIZE)
        else:
            yield Turn(self._optimizers[0], lambda: model.reconstruction(images))

    def score(self, losses: list[float]) -> float:
        """Returns the loss of the step, averaged over the batch."""
        return losses[-1] / self._factor
