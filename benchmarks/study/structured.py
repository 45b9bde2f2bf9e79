"""Networks of other shapes: on a graph, from sequence to sequence, with depthwise convolutions, on hidden patches."""

from collections.abc import Iterator

import torch
from benchmarks.study.digits import BATCH_SIZE, CLASSES, DigitBatches
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from benchmarks.study.transformer import PATCH, PATCHES, WIDTH, Block
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

NODES, COMMUNITIES, FEATURES, LABELED = 200, 4, 16, 5
SYMBOLS, LENGTH, STATE, SEQUENCES = 8, 5, 32, 32
CHANNELS, DEPTH, WARM_STEPS, RATE, WRONG = 16, 3, 200, 0.1, 0.3
HIDDEN = 12


class GraphTask(OneLossTask):
    """Finds the communities of a graph by two graph convolutions, with dropout, and by the labels of a few nodes.

    All nodes are in each batch, and most have a gradient only by their neighbors.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: nn.ModuleList([nn.Linear(FEATURES, 16), nn.Linear(16, COMMUNITIES)]), 1e-2)
        self._communities = torch.arange(NODES) % COMMUNITIES
        same = self._communities[:, None] == self._communities
        edges = torch.rand(NODES, NODES, generator=self.random).triu(1) > 1 - torch.where(same, 0.1, 0.01).triu(1)
        joined = (edges | edges.T | torch.eye(NODES, dtype=torch.bool)).float()
        degrees = joined.sum(1).rsqrt()
        self._mixing = degrees[:, None] * joined * degrees
        noise = torch.randn(NODES, FEATURES, generator=self.random)
        self._features = one_hot(self._communities, FEATURES) + noise

    def batch(self) -> Batch:
        kept = torch.rand(self._features.shape, generator=self.random) < 0.5
        return 2 * kept * self._features, self._communities[: LABELED * COMMUNITIES]

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        first, second = self.model.children()
        states = (self._mixing @ first(features)).relu()
        return cross_entropy((self._mixing @ second(states))[: len(labels)], labels)


class GRU(nn.Module):
    """One recurrent layer, step by step, so that the gradients of each step are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.new = nn.Linear(2 * STATE, 2 * STATE), nn.Linear(2 * STATE, STATE)

    def forward(self, symbol: Tensor, state: Tensor) -> Tensor:
        kept, used = self.gates(torch.cat([symbol, state], 1)).sigmoid().chunk(2, 1)
        new = self.new(torch.cat([symbol, used * state], 1)).tanh()
        return kept * state + (1 - kept) * new


class Copier(nn.Module):
    """An encoder that reads symbols, and a decoder that writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS + 1, STATE)
        self.encoder, self.decoder = GRU(), GRU()
        self.head = nn.Linear(STATE, SYMBOLS)

    def forward(self, text: Tensor, written: Tensor) -> Tensor:
        state = torch.zeros(len(text), STATE)
        for symbol in self.symbols(text).unbind(1):
            state = self.encoder(symbol, state)
        outputs: list[Tensor] = []
        for symbol in self.symbols(written).unbind(1):
            state = self.decoder(symbol, state)
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


class CopyTask(OneLossTask):
    """Writes the symbols that were read in reverse order. The gradients of the encoder come through one state."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Copier, 3e-3)

    def batch(self) -> Batch:
        text = torch.randint(SYMBOLS, (SEQUENCES, LENGTH), generator=self.random)
        return text, text.flip(1)

    def loss(self, text: Tensor, wanted: Tensor) -> Tensor:
        start = torch.full((SEQUENCES, 1), SYMBOLS)
        found = self.model(text, torch.cat([start, wanted[:, :-1]], 1))
        return cross_entropy(found.flatten(0, 1), wanted.flatten())


def separable_cnn() -> nn.Module:
    """Returns depthwise convolutions, each with a norm and a convolution of single pixels, and a classifier."""
    parts: list[nn.Module] = [nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1), nn.ReLU()]
    for _ in range(DEPTH):
        parts += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS), nn.GroupNorm(4, CHANNELS)]
        parts += [nn.Conv2d(CHANNELS, CHANNELS, 1), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * CHANNELS, CLASSES))


class NoisyLabelsTask(OneLossTask):
    """Classifies digits of which many labels are wrong, by SGD with momentum and a learning rate that is warmed up."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, separable_cnn, RATE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, momentum=0.9, foreach=True)
        self._digits = DigitBatches(seed, self.random)

    def turns(self, step: int) -> Iterator[Turn]:
        self.optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_STEPS)
        yield from super().turns(step)

    def batch(self) -> Batch:
        images, labels = self._digits.draw()
        wrong = torch.rand(BATCH_SIZE, generator=self.random) < WRONG
        others = torch.randint(CLASSES, (BATCH_SIZE,), generator=self.random)
        return images.view(-1, 1, 8, 8), torch.where(wrong, others, labels)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(images), labels)


class Painter(nn.Module):
    """A transformer that finds the pixels of hidden patches by those that are shown."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH**2, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(PATCHES, WIDTH))
        self.unknown = nn.Parameter(0.02 * torch.randn(WIDTH))
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, PATCH**2)

    def forward(self, patches: Tensor, hidden: Tensor) -> Tensor:
        shown = torch.where(hidden[..., None], self.unknown, self.patches(patches))
        return self.head(self.blocks(shown + self.positions))


class MaskedTask(OneLossTask):
    """A masked autoencoder of digits: three of four patches are hidden, and the loss is that of their pixels."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Painter, 1e-3)
        self._digits = DigitBatches(seed, self.random)

    def batch(self) -> Batch:
        images, _ = self._digits.draw()
        side = 8 // PATCH
        patches = images.view(-1, side, PATCH, side, PATCH).transpose(2, 3).reshape(-1, PATCHES, PATCH**2)
        order = torch.rand(BATCH_SIZE, PATCHES, generator=self.random).argsort(1)
        return patches, order < HIDDEN

    def loss(self, patches: Tensor, hidden: Tensor) -> Tensor:
        return mse_loss(self.model(patches, hidden)[hidden], patches[hidden])
