"""A small GPT that learns to write Python, character by character."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradscale.demo.run import Array
from gradscale.demo.text import (
    AHEAD_WEIGHT,
    DEPTH,
    HEADS,
    LANGUAGE,
    LEARNING_RATE,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Text,
    gpt_scores,
)
from gradscale.demo.torch.gpt import GPT, init_as_gpt2
from gradscale.demo.torch.task import Losses


class TwoHeads(nn.Module):
    """A GPT with a head for the next character and one for the character after it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = GPT(len(VOCABULARY), LENGTH, WIDTH, HEADS, DEPTH)
        self.next = nn.Linear(WIDTH, len(VOCABULARY), bias=False)
        self.ahead = nn.Linear(WIDTH, len(VOCABULARY), bias=False)
        self.apply(init_as_gpt2)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of the next character, and those of the one after it, at each position."""
        features = self.trunk(text)
        return self.next(features), self.ahead(features)


class LanguageTask:
    """Predicts the next character and, at a small weight, the one after it."""

    subject = LANGUAGE
    learning_rate = LEARNING_RATE

    def __init__(self, text: Text, device: torch.device) -> None:
        self._text = text
        self._device = device

    def model(self) -> nn.Module:
        return TwoHeads().to(self._device)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.from_numpy(self._text.batch(draw_from(generator))).to(self._device)

    def losses(self, model: nn.Module, batch: Tensor) -> Losses:
        loss, ahead = _head_losses(model, batch)
        return Losses(loss + AHEAD_WEIGHT * ahead, ahead)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        return gpt_scores(*map(float, _head_losses(model, torch.from_numpy(self._text.test_rows()).to(self._device))))


def draw_from(generator: torch.Generator) -> Callable[[int, tuple[int, ...]], Array]:
    """Returns a function that draws the starts of `Text.batch` from torch's random numbers."""
    return lambda high, size: torch.randint(high, size, generator=generator).numpy()


def _head_losses(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean cross-entropy of each head over all positions."""
    next_logits, ahead_logits = model(rows[:, :-2])
    return _cross_entropy(next_logits, rows[:, 1:-1]), _cross_entropy(ahead_logits, rows[:, 2:])


def _cross_entropy(logits: Tensor, characters: Tensor) -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), characters.flatten())
