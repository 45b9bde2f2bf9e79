"""The rows as a table, for the screen and for Markdown."""

import sys
from collections.abc import Sequence

from benchmarks.rows import TIMES, Row
from rich import box
from rich.console import Console
from rich.table import Table

HEADINGS = ("benchmark", "baseline", "goal", "measured", "quartiles", "mean", "ms / baseline", "")
TEXT_COLUMNS = 2
"""The first columns are read, the others compared: those stand to the right and are never broken."""

WIDTH = 150
"""Columns of the table where it does not go to a screen, which has a width of its own."""


def print_table(rows: Sequence[Row], title: str) -> None:
    """Prints the rows, and how many goals were met."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for index, heading in enumerate(HEADINGS):
        is_text = index < TEXT_COLUMNS
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*cells(row), style="red" if row.met is False else None)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(count_met(rows))


def markdown(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    rule = ["---"] * TEXT_COLUMNS + ["---:"] * (len(HEADINGS) - TEXT_COLUMNS)
    lines = [HEADINGS, rule, *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def count_met(rows: Sequence[Row]) -> str:
    """Returns how many goals there are, and how many were met."""
    with_goal = [row for row in rows if row.met is not None]
    missed = sum(not row.met for row in with_goal)
    return f"Goals: {len(with_goal)}, met: {len(with_goal) - missed}, missed: {missed}; rows: {len(rows)}"


def cells(row: Row) -> list[str]:
    """Returns what a row shows under each heading."""
    baseline = row.baseline
    if row.baseline_measured is not None:
        baseline = f"{baseline}: {_figure(row, row.baseline_measured)}"
    return [
        row.benchmark if row.unit == TIMES else f"{row.benchmark} ({row.unit})",
        baseline,
        _goal(row),
        _figure(row, row.measured),
        "" if row.quartiles is None else f"{row.quartiles[0]:.2f}-{row.quartiles[1]:.2f}",
        "" if row.mean is None else f"{row.mean:.3f}",
        "" if row.seconds is None else " / ".join(f"{second * 1e3:.2f}" for second in row.seconds),
        {None: "", True: "met", False: "MISSED"}[row.met],
    ]


def _goal(row: Row) -> str:
    if row.goal is None:
        return ""
    return f"{'>=' if row.at_least else '<='} {row.goal:{'.2f' if row.unit == TIMES else 'g'}}"


def _figure(row: Row, value: float) -> str:
    """Returns a number as it is shown: with a digit more than goals have, so that a near miss is seen to be one."""
    return f"{value:.3f}" if row.unit == TIMES else f"{value:.3g}"
