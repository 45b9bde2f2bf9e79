"""The text, as torch takes it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradscale.demo.text import VOCABULARY, load_numbers

__all__ = ["VOCABULARY", "Text", "load_text"]


@dataclass(frozen=True)
class Text:
    """Numbers of characters, in order; split into training and test.

    Attributes:
        train: the first part.
        test: the rest.
    """

    train: Tensor
    test: Tensor

    def batch(self, sequences: int, length: int, generator: torch.Generator) -> Tensor:
        """Returns random stretches of the training text, one in each row."""
        starts = torch.randint(len(self.train) - length + 1, (sequences, 1), generator=generator)
        return self.train[starts + torch.arange(length)]

    def test_rows(self, rows: int, length: int) -> Tensor:
        """Returns the beginning of the test text as rows."""
        return self.test[: rows * length].view(rows, length)


def load_text() -> Text:
    """Returns the text. The same interpreter gives the same text."""
    train, test = load_numbers()
    return Text(torch.from_numpy(train), torch.from_numpy(test))
