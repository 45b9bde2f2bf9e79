"""A mixture of experts, of which a router chooses two for each part of an image."""

import torch
from benchmarks.study.digits import CLASSES, DigitBatches, layers
from benchmarks.study.one_loss import Batch, OneLossTask
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

EXPERTS, CHOSEN, WIDTH = 4, 2, 32
BALANCE_WEIGHT, ROUTER_WEIGHT = 1e-2, 1e-3


class Experts(nn.Module):
    """Classifies an image by the mean over its rows, of which each is seen by the two experts that the router chooses.

    Attributes:
        extra: what the last images add to the loss: experts that are used unevenly, and large logits of the router.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(8, WIDTH))
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(layers((WIDTH, 2 * WIDTH, WIDTH)) for _ in range(EXPERTS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
        self.extra = torch.zeros(())

    def forward(self, images: Tensor) -> Tensor:
        x = (self.rows(images.view(-1, 8, 8)) + self.positions).flatten(0, 1)
        logits = self.router(x).float()
        shares = logits.softmax(1)
        weights, chosen = shares.topk(CHOSEN, 1)
        weights = weights / weights.sum(1, keepdim=True)
        mixed = x.float()
        for index, expert in enumerate(self.experts.children()):
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, weights[rows, slots, None] * expert(x[rows]).float())
        used = one_hot(chosen, EXPERTS).float().mean((0, 1))
        balance = EXPERTS * (used * shares.mean(0)).sum()
        self.extra = BALANCE_WEIGHT * balance + ROUTER_WEIGHT * logits.logsumexp(1).square().mean()
        return self.head(mixed.view(-1, 8, WIDTH).mean(1))


class ExpertsTask(OneLossTask):
    """Classifies digits by a mixture of experts. The losses of the router are small beside that of the digits."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Experts, 2e-3)
        self._digits = DigitBatches(seed, self.random)

    def batch(self) -> Batch:
        return self._digits.draw()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(self.model, Experts)
        return cross_entropy(self.model(images), labels) + self.model.extra
