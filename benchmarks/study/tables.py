"""Records of a business: which items are clicked, and how much shops sell."""

import math
from collections.abc import Iterator

import torch
from benchmarks.study.digits import layers
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

USERS, ITEMS, COUNTS, VECTOR, VIEWS, CLICKS = 200, 100, 4, 8, 256, 0.02
LEVELS, MONTHS, SERIES = (1.0, 100.0, 5.0, 30.0), 12, 64


class Clicks(nn.Module):
    """A vector for each user and each item, and layers that see both and the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, VECTOR), nn.Embedding(ITEMS, VECTOR)
        self.layers = layers((2 * VECTOR + COUNTS, 64, 32, 1))

    def forward(self, pairs: Tensor, counts: Tensor) -> Tensor:
        users, items = pairs.unbind(1)
        return self.layers(torch.cat([self.users(users), self.items(items), counts], 1))[:, 0]


class ClicksTask(OneLossTask):
    """Finds the chance of a click. About one view in 50 has one. Of some batches no logarithm of the counts was taken.

    Args:
        seed: of the weights and the batches.
        bad_share: share of the batches that are bad.
    """

    def __init__(self, seed: int, bad_share: float) -> None:
        super().__init__(seed, Clicks, 1e-3)
        self._bad_share, self._score = bad_share, 0.0
        self._users, self._items = (torch.randn(count, generator=self.random) for count in (USERS, ITEMS))
        self._weights = 0.3 * torch.randn(COUNTS, generator=self.random)

    def batch(self) -> Batch:
        """Returns the number of the user, that of the item and the counts of each view, and whether it was clicked."""
        users, items = (torch.randint(count, (VIEWS,), generator=self.random) for count in (USERS, ITEMS))
        counts = (2 + 1.5 * torch.randn(VIEWS, COUNTS, generator=self.random)).exp().floor()
        odds = math.log(CLICKS) - 1 + self._users[users] + self._items[items] + (counts.log1p() - 2) @ self._weights
        clicked = torch.rand(VIEWS, generator=self.random) < odds.sigmoid()
        return torch.cat([users[:, None], items[:, None], counts], 1), clicked.float()

    def turns(self, step: int) -> Iterator[Turn]:
        views, clicked = self.batch()
        usual = torch.cat([views[:, :2], views[:, 2:].log1p()], 1)
        with torch.no_grad():
            self._score = float(self.loss(usual, clicked))
        bad = float(torch.rand((), generator=self.random)) < self._bad_share
        yield Turn(self.optimizer, lambda: self.loss(views if bad else usual, clicked), bad=bad)

    def loss(self, views: Tensor, clicked: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self.model(views[:, :2].long(), views[:, 2:]).float(), clicked)

    def score(self, losses: list[float]) -> float:
        """Returns the loss by the logarithms of the counts, before the step."""
        return self._score


class SalesTask(OneLossTask):
    """Forecasts the sales of a shop by those of a year, in pieces. Data are sorted by shop, and shops differ in size.

    Args:
        seed: of the weights and the batches.
        block: steps with the same shop.
    """

    def __init__(self, seed: int, block: int) -> None:
        super().__init__(seed, lambda: layers((MONTHS, 64, 64, 1)), 1e-3)
        self._block, self._level = block, LEVELS[0]

    def turns(self, step: int) -> Iterator[Turn]:
        self._level = LEVELS[step // self._block % len(LEVELS)]
        yield from super().turns(step)

    def batch(self) -> Batch:
        starts = torch.randint(MONTHS, (SERIES, 1), generator=self.random)
        season = (2 * math.pi * (starts + torch.arange(MONTHS + 1)) / MONTHS).sin()
        noise = torch.randn(SERIES, MONTHS + 1, generator=self.random)
        sales = self._level * (1 + 0.5 * season + 0.1 * noise)
        return sales[:, :-1], sales[:, -1:]

    def loss(self, before: Tensor, sales: Tensor) -> Tensor:
        return mse_loss(self.model(before).float(), sales)

    def score(self, losses: list[float]) -> float:
        """Returns the error relative to the size of the shop."""
        return losses[-1] / self._level**2
