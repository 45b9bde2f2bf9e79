"""An LSTM that predicts the next character, with a loss that is summed over characters."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from benchmarks.study.task import Turn
from examples.demo.data import VOCABULARY, Text, load_text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LENGTH, WIDTH, SEQUENCES = 12, 48, 8
RATE = 3e-3


class LSTM(nn.Module):
    """One recurrent layer, step by step, so that the gradients of each step are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), WIDTH)
        self.gates = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.head = nn.Linear(WIDTH, len(VOCABULARY))

    def forward(self, text: Tensor) -> Tensor:
        hidden = cell = torch.zeros(len(text), WIDTH)
        outputs: list[Tensor] = []
        for character in self.characters(text).unbind(1):
            opened, new = self.gates(torch.cat([character, hidden], 1)).split([3 * WIDTH, WIDTH], 1)
            put, kept, shown = opened.sigmoid().chunk(3, 1)
            cell = kept * cell + put * new.tanh()
            hidden = shown * cell.tanh()
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1))


class RecurrentTask:
    """Predicts the next character of the standard library's source code.

    Args:
        seed: of the weights and the batches.
        bad_share: share of the batches that are bad.
        bad_factor: what their loss is multiplied by.
    """

    def __init__(self, seed: int, bad_share: float, bad_factor: float) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = LSTM()
        self._rng = np.random.default_rng(seed)
        self._optimizer = torch.optim.Adam(self.model.parameters(), RATE, foreach=True)
        self._bad_share, self._bad_factor, self._factor = bad_share, bad_factor, 1.0

    def turns(self, step: int) -> Iterator[Turn]:
        batch = torch.from_numpy(_text().batch(self._rng.integers, SEQUENCES, LENGTH + 1))
        bad = self._rng.random() < self._bad_share
        self._factor = self._bad_factor if bad else 1.0
        yield Turn(self._optimizer, lambda: self._loss(batch) * self._factor, SEQUENCES * LENGTH, bad)

    def score(self, losses: list[float]) -> float:
        """Returns the loss of a character, without the factor."""
        return losses[-1] / self._factor / (SEQUENCES * LENGTH)

    def _loss(self, batch: Tensor) -> Tensor:
        return cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


@cache
def _text() -> Text:
    return load_text()
