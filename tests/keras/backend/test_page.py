"""The code on the page about Keras runs as it stands, from top to bottom; that of another backend is left out."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
from tests.keras.backend.helpers import BACKEND

PAGE = Path(__file__).parents[3] / "docs" / "keras.md"

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMPORTED = re.compile(r"^import (tensorflow|jax|torch)\b", re.MULTILINE)


@pytest.fixture(autouse=True)
def _policy_as_before() -> Iterator[None]:
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def test_the_code_on_the_page_runs() -> None:
    text = PAGE.read_text()
    blocks = [block for block in BLOCK.finditer(text) if set(IMPORTED.findall(block[1])) <= {BACKEND}]
    assert len(blocks) > 8
    names: dict[str, Any] = {}
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
