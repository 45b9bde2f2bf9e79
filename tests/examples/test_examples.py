"""Every example runs as it stands, warns of nothing, and learns."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.examples.run import EXAMPLES as FOLDER
from tests.examples.run import lines_printed

EXAMPLES = sorted(FOLDER.glob("*.py"))

CLOSING = re.compile(r"(?P<before>[\d.]+) -> (?P<after>[\d.]+)\b.*, skipped (?P<skipped>\d+) of (?P<steps>\d+)")
"""How the last line of every example ends: what was learned, and what became of the steps."""


def needed(name: str) -> list[str]:
    """Returns the packages of an example: its framework, by which its name begins, and of Keras the backend too."""
    framework, _, rest = name.partition("_")
    backends = {"tf": "tensorflow", "jax": "jax", "torch": "torch"}
    return [framework, *(backends[word] for word in rest.split("_") if framework == "keras" and word in backends)]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 12


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_learns_and_seldom_skips(path: Path) -> None:
    if missing := [name for name in needed(path.stem) if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    last_line = lines_printed(path.stem)[-1]
    closing = CLOSING.search(last_line)
    assert closing is not None, last_line
    assert float(closing["after"]) < 0.5 * float(closing["before"])
    assert int(closing["skipped"]) < 0.1 * int(closing["steps"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_fits_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 75
