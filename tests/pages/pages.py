"""The pages a reader sees, and running the Python on one of them as it stands, from top to bottom."""

import doctest
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INCLUDED = "--8<--"
"""What stands in a block instead of code: a file of examples/, which is run as the program it is."""

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    code: str
    line: int


def pages_with(needs: str | None) -> list[str]:
    """The pages with Python that need this framework: "keras", "mxnet", or None for all that need neither.

    Keras settles its backend when it is first imported, and MXNet has an environment of its own: their pages run there.
    """
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in found if any(blocks(page)) and needed_by(page) == needs)


def needed_by(page: Path) -> str | None:
    imported = re.findall(r"^[> ]*(?:import|from) (?:gradscale\.)?(keras|mxnet)\b", page.read_text(), re.MULTILINE)
    return min(imported, default=None)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for block in FENCE.finditer(text):
        if not block[2].lstrip().startswith(INCLUDED):
            yield Block(dedent(block[2]), text[: block.start()].count("\n") + 1)


def run_page(name: str, names: dict[str, Any] | None = None, wanted: Callable[[str], bool] = lambda code: True) -> None:
    """Runs the blocks of a page, one after the other, with the names that those before have made.

    A block with prompts (`>>>`) must print what it says. "cuda" is read as "cpu".

    Args:
        name: the page's path in the repository.
        names: what the page takes for granted.
        wanted: which blocks to run, by their code.
    """
    page = ROOT / name
    names = {"__name__": "__main__"} | (names or {})
    chosen = [block for block in blocks(page) if wanted(block.code)]
    assert chosen
    for block in chosen:
        code = block.code.replace('"cuda"', '"cpu"')
        if ">>>" in code:
            examples = doctest.DocTestParser().get_doctest(code, names, name, str(page), block.line)
            examples.globs = names  # the parser copies them, and the next block needs what this one makes
            assert doctest.DocTestRunner(optionflags=FLAGS).run(examples, clear_globs=False).failed == 0
        else:
            exec(compile("\n" * block.line + code, str(page), "exec"), names)
