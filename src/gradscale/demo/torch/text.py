"""The text: the source code of Python's own standard library, which comes with the interpreter."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MODULES = ("argparse", "ast", "dataclasses", "difflib", "inspect", "subprocess")
"""Modules of one file each, in every Python since 3.11: about half a megabyte."""

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
"""The characters: the printable ones of ASCII and the end of a line. Others are left out of the text."""

TEST_SHARE = 0.1


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
    folder = Path(sysconfig.get_path("stdlib"))
    source = "".join((folder / f"{module}.py").read_text(encoding="utf-8") for module in MODULES)
    number = {character: index for index, character in enumerate(VOCABULARY)}
    numbers = torch.tensor([number[character] for character in source if character in number])
    train_size = int(len(numbers) * (1 - TEST_SHARE))
    return Text(numbers[:train_size], numbers[train_size:])
