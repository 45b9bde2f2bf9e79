"""The table of versions and results in the documentation, which is also the memory of rows that were not run again."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.matrix.outcome import Counts, Outcome
from tests.matrix.rows import Row, Run

BEGIN = "<!-- written by `make test-matrix` from here -->"
END = "<!-- to here -->"
HEAD = (
    "| row | Python | versions | tests | passed | skipped | failed | result |",
    "|---|---|---|---|---|---|---|---|",
)


def line_of(run: Run, outcome: Outcome) -> str:
    """Returns the line of a run."""
    numbers = _numbers(outcome.counts)
    result = outcome.result if outcome.result == "passed" else f"**{outcome.result}**"
    result += f": {outcome.reason}" if outcome.reason else ""
    cells = (run.name, outcome.python, ", ".join(outcome.versions) or "-", run.tests, *numbers, result)
    return f"| {' | '.join(cells)} |"


def _numbers(counts: Counts | None) -> tuple[str, str, str]:
    if counts is None:
        return "-", "-", "-"
    skipped = f"{counts.skipped}, {counts.xfailed} xfailed" if counts.xfailed else str(counts.skipped)
    return str(counts.passed), skipped, str(counts.failed)


def lines_in(page: str) -> dict[str, str]:
    """Returns the lines of the table in a page, by the name in the first cell."""
    lines = _table(page)[1].splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and line not in HEAD}


def updated(page: str, rows: Sequence[Row], outcomes: Mapping[str, Outcome]) -> str:
    """Returns the page with a line for every run of `rows`.

    A run with an outcome gets a new line, one without keeps the line it had, and one that never had one is `not run`.
    Lines of runs that no row has any more go.
    """
    before = lines_in(page)
    lines = [
        line_of(run, outcomes[run.name])
        if run.name in outcomes
        else before.get(run.name, line_of(run, Outcome("not run", row.python)))
        for row in rows
        for run in row.runs
    ]
    start, end = _table(page).span(1)
    return page[:start] + "\n".join(["", "", *HEAD, *lines, "", ""]) + page[end:]


def write(path: Path, rows: Sequence[Row], outcomes: Mapping[str, Outcome]) -> None:
    """Updates the table in a file, in one step: a run that is stopped leaves a whole page."""
    text = updated(path.read_text(), rows, outcomes)
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _table(page: str) -> re.Match[str]:
    found = re.search(re.escape(BEGIN) + "(.*?)" + re.escape(END), page, re.DOTALL)
    if not found:
        raise ValueError(f"The page must have {BEGIN!r} and, after it, {END!r}, with the table in between.")
    return found
