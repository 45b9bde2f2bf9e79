"""The table in the documentation: new lines for what ran, old ones for what did not."""

from pathlib import Path

import pytest
from tests.matrix.__main__ import PAGE as VERSIONS
from tests.matrix.outcome import Counts, Outcome
from tests.matrix.rows import ROWS, Row, Run
from tests.matrix.table import BEGIN, END, line_of, lines_in, updated, write

PAGE = f"# Page\n\n{BEGIN}\n{END}\n\nThe end.\n"


def row(name: str, *runs: str) -> Row:
    return Row(name, "3.11", (), (), tuple(Run(run, "adapter", (), ()) for run in runs or (name,)))


PASSED = Outcome("passed", "3.11.7", ("numpy 1.26.4",), Counts(passed=10, skipped=2))


def test_a_line_has_the_versions_and_the_counts() -> None:
    run = Run("numpy-1", "adapter, conformance", (), ())
    assert line_of(run, PASSED) == "| numpy-1 | 3.11.7 | numpy 1.26.4 | adapter, conformance | 10 | 2 | 0 | passed |"


def test_a_failure_and_what_was_not_run_are_plain_to_see() -> None:
    run = Run("a", "adapter", (), ())
    failed = Outcome("failed", "3.11.7", ("numpy 2",), Counts(passed=1, failed=2, skipped=1, xfailed=3))
    assert line_of(run, failed) == "| a | 3.11.7 | numpy 2 | adapter | 1 | 1, 3 xfailed | 2 | **failed** |"
    missing = Outcome("not run", "3.14", reason="no Python 3.14 here")
    assert line_of(run, missing) == "| a | 3.14 | - | adapter | - | - | - | **not run**: no Python 3.14 here |"


def test_a_row_that_is_not_run_again_keeps_its_line() -> None:
    rows = [row("a"), row("b", "b on x", "b on y")]
    first = updated(PAGE, rows, {"a": PASSED, "b on x": PASSED})
    second = updated(first, rows, {"b on x": Outcome("failed", "3.11.7", counts=Counts(failed=1))})
    assert lines_in(second)["a"] == lines_in(first)["a"] == line_of(rows[0].runs[0], PASSED)
    assert "**failed**" in lines_in(second)["b on x"]
    assert "**not run**" in lines_in(second)["b on y"]


def test_the_lines_are_in_the_order_of_the_rows_and_those_of_rows_that_went_are_gone() -> None:
    page = updated(PAGE, [row("old"), row("b")], {"old": PASSED, "b": PASSED})
    assert list(lines_in(updated(page, [row("a"), row("b")], {"a": PASSED}))) == ["a", "b"]


def test_the_rest_of_the_page_stays() -> None:
    page = updated(PAGE, [row("a")], {"a": PASSED})
    assert page.startswith(f"# Page\n\n{BEGIN}\n\n| row ")
    assert page.endswith(f"|\n\n{END}\n\nThe end.\n")
    assert updated(page, [row("a")], {}) == page


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="must have"):
        updated("# Page\n", [row("a")], {})


def test_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "versions.md"
    path.write_text(PAGE)
    write(path, [row("a")], {"a": PASSED})
    assert path.read_text() == updated(PAGE, [row("a")], {"a": PASSED})
    assert [each.name for each in tmp_path.iterdir()] == ["versions.md"]


def test_the_page_of_supported_versions_has_a_line_for_every_run() -> None:
    lines = lines_in(VERSIONS.read_text())
    assert list(lines) == [run.name for each in ROWS for run in each.runs]
    assert any(line.endswith("| passed |") for line in lines.values())


def test_every_run_has_a_name_of_its_own() -> None:
    names = [run.name for each in ROWS for run in each.runs]
    assert len(set(names)) == len(names)
