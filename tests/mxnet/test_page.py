"""The code on the page about MXNet runs as it stands, from top to bottom."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "mxnet.md"

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_code_on_the_page_runs() -> None:
    text = PAGE.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) > 5
    names: dict[str, Any] = {}
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
