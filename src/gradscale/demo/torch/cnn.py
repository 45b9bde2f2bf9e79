"""A deep plain convolutional network that learns to read handwritten digits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

from gradscale.demo.digits import Digits
from gradscale.demo.run import Subject
from gradscale.demo.torch.task import Losses

LAYERS = 13
CHANNELS = 16
BATCH_SIZE = 32


class DigitsTask:
    """Thirteen convolutions in a row, as torch initializes them, with no normalization and no residuals.

    That is why FP16 fails: the loss is a mean over 320 outputs, each layer passes on less than half of the gradient,
    and before it reaches the first layers it is below the smallest FP16 number. FP32 has the range for it, and Adam's
    update does not depend on how small a gradient is.
    """

    subject = Subject(
        model="cnn",
        loss_title="Loss of the CNN",
        scores={"accuracy": ".1%"},
        caption="a deep CNN reads handwritten digits",
    )
    learning_rate = 1.5e-3

    def __init__(self, digits: Digits, device: torch.device) -> None:
        self._device = device
        self._images, self._test_images = _as_images(digits.images, device), _as_images(digits.test_images, device)
        self._labels = torch.as_tensor(digits.labels, device=device)
        self._test_labels = torch.as_tensor(digits.test_labels, device=device)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1), nn.LeakyReLU(0.1)]
        for _ in range(LAYERS - 1):
            layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.LeakyReLU(0.1)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * CHANNELS, 10))
        # FP16 convolutions on a CPU take two thirds of the time in this layout.
        return model.to(self._device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self._images), (BATCH_SIZE,), generator=generator).to(self._device)
        return self._images[chosen], self._labels[chosen]

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Losses:
        images, labels = batch
        loss = mse_loss(model(images).float(), one_hot(labels, 10).float())
        return Losses(loss, loss)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        guesses = model(self._test_images).argmax(dim=1)
        return {"accuracy": float((guesses == self._test_labels).float().mean())}


def _as_images(rows: Any, device: torch.device) -> Tensor:
    """Returns rows of 64 pixels as images of one channel, with mean 0 and deviation 1 over all of them."""
    images = torch.as_tensor(rows, device=device).view(-1, 1, 8, 8)
    return (images - images.mean()) / images.std()
