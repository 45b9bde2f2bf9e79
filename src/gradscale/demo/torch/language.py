"""A small GPT that learns to write Python, character by character."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradscale.demo.run import Score, Subject
from gradscale.demo.torch.gpt import GPT, init_as_gpt2
from gradscale.demo.torch.task import Losses
from gradscale.demo.torch.text import VOCABULARY, Text

PERPLEXITY = Score("perplexity", ".1f")
MAIN_HEAD = Score("main head", ".1f")

AHEAD_WEIGHT = 1e-5
"""Weight of the second head's loss, and the cause of the trouble: the gradient of its logits is at most this over the
512 characters of a batch, 2e-8, and all below 3e-8 is zero in FP16."""

LENGTH = 32
SEQUENCES = 16
TEST_SEQUENCES = 512


class TwoHeads(nn.Module):
    """A GPT with a head for the next character and one for the character after it."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.trunk = GPT(len(VOCABULARY), LENGTH, width, heads=4, depth=2)
        self.next = nn.Linear(width, len(VOCABULARY), bias=False)
        self.ahead = nn.Linear(width, len(VOCABULARY), bias=False)
        self.apply(init_as_gpt2)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of the next character, and those of the one after it, at each position."""
        features = self.trunk(text)
        return self.next(features), self.ahead(features)


class LanguageTask:
    """Predicts the next character and, at a small weight so as not to disturb, the one after it."""

    subject = Subject(
        model="gpt",
        loss_title="Loss of the GPT's second head",
        scores=(PERPLEXITY, MAIN_HEAD),
        caption="perplexity, loss: of the second head; main head: its perplexity",
    )
    learning_rate = 4e-3

    def __init__(self, text: Text, device: torch.device) -> None:
        """Keeps the data.

        Args:
            text: what to read.
            device: where to train.
        """
        self._text = text
        self._device = device

    def model(self) -> nn.Module:
        return TwoHeads().to(self._device)

    def batch(self, generator: torch.Generator) -> Tensor:
        return self._text.batch(SEQUENCES, LENGTH + 2, generator).to(self._device)

    def losses(self, model: nn.Module, batch: Tensor) -> Losses:
        next_logits, ahead_logits = model(batch[:, :-2])
        loss, ahead = _loss(next_logits, batch[:, 1:-1]), _loss(ahead_logits, batch[:, 2:])
        return Losses(loss + AHEAD_WEIGHT * ahead, ahead)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        rows = self._text.test_rows(TEST_SEQUENCES, LENGTH + 2).to(self._device)
        next_logits, ahead_logits = model(rows[:, :-2])
        return {
            PERPLEXITY.name: float(_loss(ahead_logits, rows[:, 2:]).exp()),
            MAIN_HEAD.name: float(_loss(next_logits, rows[:, 1:-1]).exp()),
        }


def _loss(logits: Tensor, characters: Tensor) -> Tensor:
    """Returns the mean cross-entropy over all positions."""
    return cross_entropy(logits.float().flatten(0, 1), characters.flatten())
