"""Every example runs as it stands, warns of nothing, and learns."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

CLOSING = re.compile(r"(?P<before>[\d.]+) -> (?P<after>[\d.]+)\b.*, skipped (?P<skipped>\d+) of (?P<steps>\d+)")
"""How the last line of every example ends: what was learned, and what became of the steps."""


@pytest.fixture
def _one_thread(path: Path) -> Iterator[None]:
    """Runs torch on one thread: these models are too small to share, and waiting for a busy core takes longer.

    Skips the test of an example whose framework, by which its name begins, is not installed.
    """
    if not path.stem.startswith("torch"):
        pytest.importorskip(path.stem.partition("_")[0])
        yield
        return
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 12


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_learns_and_seldom_skips(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    last_line = capsys.readouterr().out.splitlines()[-1]
    closing = CLOSING.search(last_line)
    assert closing is not None, last_line
    assert float(closing["after"]) < 0.5 * float(closing["before"])
    assert int(closing["skipped"]) < 0.1 * int(closing["steps"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_fits_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 75
