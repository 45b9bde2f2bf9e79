"""The notebooks run from top to bottom, and the outputs stored in them are what they print."""

import json
from pathlib import Path
from typing import Any

import pytest
from docs.notebooks.run import run

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))

VARIES = "varies"
"""Tag of cells whose numbers depend on the machine: these are run and not compared."""


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_is_stored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parents[2])
    notebook = json.loads(path.read_text())
    stored = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for before, after in zip(stored, run(notebook), strict=True):
        if VARIES not in before["metadata"].get("tags", ()):
            assert texts(after) == texts(before), f"In [{after['execution_count']}] printed something else"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_plot_of_a_notebook_has_an_alternative_text(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", ())):
            assert cell["metadata"].get("alt"), f"In [{cell['execution_count']}] needs `alt` in its metadata"


def texts(cell: dict[str, Any]) -> list[str]:
    """Returns what a cell has printed and what its last line returned; for a plot, that there was one."""
    return ["".join(output.get("text") or output["data"]["text/plain"]) for output in cell["outputs"]]
