"""Running the code of a documentation page as it stands, from top to bottom."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_page(name: str, least: int, wanted: Callable[[str], bool] = lambda code: True) -> None:
    """Runs the blocks of a page, one after the other, with the names that those before have made.

    Args:
        name: the page's file.
        least: how many blocks there must be at least, so that a page that is not read is noticed.
        wanted: which blocks to run, by their code.
    """
    page = DOCS / name
    text = page.read_text()
    blocks = [block for block in BLOCK.finditer(text) if wanted(block[1])]
    assert len(blocks) >= least
    names: dict[str, Any] = {}
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), names)
