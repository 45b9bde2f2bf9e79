"""The text: the source code of Python's own standard library, which comes with the interpreter."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

MODULES = ("argparse", "ast", "dataclasses", "difflib", "inspect", "subprocess")
"""Modules of one file each, in every Python since 3.11: about half a megabyte."""

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
"""The characters: the printable ones of ASCII and the end of a line. Others are left out of the text."""

TEST_SHARE = 0.1

Array = np.ndarray[Any, Any]


def load_numbers() -> tuple[Array, Array]:
    """Returns the text as numbers of characters, in order: the part to train on, and the rest.

    The same interpreter gives the same text.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    source = "".join((folder / f"{module}.py").read_text(encoding="utf-8") for module in MODULES)
    number = {character: index for index, character in enumerate(VOCABULARY)}
    numbers = np.array([number[character] for character in source if character in number])
    train_size = int(len(numbers) * (1 - TEST_SHARE))
    return numbers[:train_size], numbers[train_size:]
