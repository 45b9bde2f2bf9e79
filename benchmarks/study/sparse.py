"""Gradients that are zero in many places: of rows that no batch uses, of pairs that are apart, and of easy images."""

import torch
from benchmarks.study.digits import BATCH_SIZE, CLASSES, PIXELS, DigitBatches, layers
from benchmarks.study.one_loss import Batch, OneLossTask
from examples.demo.data import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

USERS, ITEMS, RANK, RATINGS = 400, 300, 8, 64
MARGIN = 0.2
FOCUS = 2.0


class Factors(nn.Module):
    """A vector for each user and each item, whose product is the rating, and a mean for each item."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, RANK), nn.Embedding(ITEMS, RANK)
        self.means = nn.Embedding(ITEMS, 1)
        for embedding in (self.users, self.items, self.means):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        users, items = pairs.unbind(1)
        return (self.users(users) * self.items(items)).sum(1) + self.means(items)[:, 0]


class FactorizationTask(OneLossTask):
    """Factorizes a matrix of ratings. Few items have most of the ratings, and most rows are in few batches."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Factors, 1e-2)
        self._users = torch.randn(USERS, RANK, generator=self.random)
        self._items = torch.randn(ITEMS, RANK, generator=self.random) / RANK**0.5
        self._popularity = 1 / torch.arange(1.0, ITEMS + 1)

    def batch(self) -> Batch:
        users = torch.randint(USERS, (RATINGS,), generator=self.random)
        items = torch.multinomial(self._popularity, RATINGS, replacement=True, generator=self.random)
        noise = 0.3 * torch.randn(RATINGS, generator=self.random)
        return torch.stack([users, items], 1), 3 + (self._users[users] * self._items[items]).sum(1) + noise

    def loss(self, pairs: Tensor, ratings: Tensor) -> Tensor:
        return mse_loss(self.model(pairs).float(), ratings)


class TripletTask(OneLossTask):
    """Makes digits closer to the same digit than to others, by a margin, for all triplets of a batch.

    Triplets that have the margin have no gradient. In the end that is most of them, and all of some batches.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: layers((PIXELS, 64, 64, 16)), 1e-3)
        self._digits = DigitBatches(seed, self.random)

    def batch(self) -> Batch:
        return self._digits.draw()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        features = normalize(self.model(images).float())
        distances = 2 - 2 * features @ features.T
        same = labels[:, None] == labels
        pairs = same & ~torch.eye(BATCH_SIZE, dtype=torch.bool)
        triplets = pairs[:, :, None] & ~same[:, None, :]
        return (distances[:, :, None] - distances[:, None, :] + MARGIN).relu()[triplets].mean()


class FocalTask(OneLossTask):
    """Classifies digits of which each is half as frequent as the one before, by the focal loss.

    It all but leaves out the images that are easy, as soon those of the frequent digits are.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: layers((PIXELS, 64, 64, CLASSES)), 1e-3)
        digits = load_digits(seed)
        self._images, self._labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
        self._frequency = 0.5**self._labels

    def batch(self) -> Batch:
        chosen = torch.multinomial(self._frequency, BATCH_SIZE, replacement=True, generator=self.random)
        return self._images[chosen], self._labels[chosen]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        errors = cross_entropy(self.model(images).float(), labels, reduction="none")
        return ((1 - (-errors).exp()) ** FOCUS * errors).mean()
