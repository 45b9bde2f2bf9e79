"""A small char-GPT, and what can go wrong in its training."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from benchmarks.study.task import Turn
from examples.demo.data import VOCABULARY, Text, load_text
from examples.demo.with_torch import GPT, init_as_gpt2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LENGTH, WIDTH, HEADS, DEPTH, SEQUENCES = 16, 32, 4, 2, 8
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Trouble:
    """What makes the training of the GPT hard.

    Attributes:
        loss_factor: what every loss is multiplied by.
        bad_share: share of the batches that are bad.
        bad_factor: what the loss of a bad batch is multiplied by.
        hot_steps: the first and the last step of a too high learning rate.
        hot_factor: how many times too high.
        warm_steps: steps of training in FP32 before the run: it then is a fine-tuning.
    """

    loss_factor: float = 1.0
    bad_share: float = 0.0
    bad_factor: float = 100.0
    hot_steps: tuple[int, int] = (-1, -1)
    hot_factor: float = 30.0
    warm_steps: int = 0


class CharGPT(nn.Module):
    """A GPT that predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = GPT(len(VOCABULARY), LENGTH, WIDTH, HEADS, DEPTH)
        self.head = nn.Linear(WIDTH, len(VOCABULARY), bias=False)
        self.apply(init_as_gpt2)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.trunk(text))


class LanguageTask:
    """Predicts the next character of the standard library's source code."""

    def __init__(self, seed: int, trouble: Trouble) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = CharGPT()
        self._trouble, self._factor = trouble, 1.0
        self._rng = np.random.default_rng(seed)
        # An epsilon that stays small beside gradients of tiny losses. `foreach`: the same numbers, with less time
        # between small kernels.
        self._optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, eps=1e-16, foreach=True)
        for _ in range(trouble.warm_steps):
            self._loss(self._batch()).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def turns(self, step: int) -> Iterator[Turn]:
        trouble, batch = self._trouble, self._batch()
        first, last = trouble.hot_steps
        hot = trouble.hot_factor if first <= step <= last else 1.0
        self._optimizer.param_groups[0]["lr"] = LEARNING_RATE * hot
        bad = self._rng.random() < trouble.bad_share
        self._factor = trouble.loss_factor * (trouble.bad_factor if bad else 1.0)
        yield Turn(self._optimizer, lambda: self._loss(batch) * self._factor, trouble.loss_factor, bad)

    def score(self, losses: list[float]) -> float:
        """Returns the loss without its factor."""
        return losses[-1] / self._factor

    def _batch(self) -> Tensor:
        return torch.from_numpy(_text().batch(self._rng.integers, SEQUENCES, LENGTH + 1))

    def _loss(self, batch: Tensor) -> Tensor:
        return cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def warmed_up(seed: int, trouble: Trouble) -> LanguageTask:
    """Returns the task after its steps in FP32, which are run once for all rules."""
    return copy.deepcopy(_warmed_up(seed, trouble))


@cache
def _warmed_up(seed: int, trouble: Trouble) -> LanguageTask:
    return LanguageTask(seed, trouble)


@cache
def _text() -> Text:
    return load_text()
