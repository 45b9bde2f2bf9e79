"""The folders of the package are no larger than the table of lines in CONTRIBUTING.md says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(src[^`]*)` \| ([\d,]+) \|", re.MULTILINE)


def rows(page: str) -> dict[str, int]:
    """Returns the lines that each folder may have."""
    return {folder: int(figure.replace(",", "")) for folder, figure in ROW.findall(page)}


def lines_of(folder: str) -> int:
    """Returns the lines of all modules in a folder and those below it; of `folder/*.py`, of those in it alone."""
    files = list(ROOT.glob(folder) if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
    assert files, f"CONTRIBUTING.md has a row for {folder}, which has no modules"
    return sum(file.read_bytes().count(b"\n") for file in files)


LIMITS = rows((ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("folder", LIMITS)
def test_a_folder_has_no_more_lines_than_its_row(folder: str) -> None:
    found = lines_of(folder)
    assert found <= LIMITS[folder], f"{folder} has {found:,} lines, its row in CONTRIBUTING.md says {LIMITS[folder]:,}"


def test_the_rows_are_read() -> None:
    assert rows("| folder | lines |\n|---|---|\n| `src/a` | 1,234 |\n| `src/b/*.py` | 5 |\n| `tests` | 6 |\n") == {
        "src/a": 1234,
        "src/b/*.py": 5,
    }
    assert {"src", "src/gradscale/torch"} <= set(LIMITS)
    assert lines_of("src/gradscale/torch/*.py") < lines_of("src/gradscale/torch")
