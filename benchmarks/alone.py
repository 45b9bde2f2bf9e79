"""One benchmark run by itself: `python -m benchmarks.bench_replay [--quick]`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.machine import describe, summary
from benchmarks.rows import Row
from benchmarks.table import print_table

QUICK = "few repeats and smaller models: checks that it runs, and its figures are rough"


def run_alone(
    title: str, rows: Callable[[bool], list[Row]], draw: Callable[[Sequence[Row], Path], None] | None = None
) -> None:
    """Measures, and prints the table; with `--plot FILE` draws it as well.

    Args:
        title: what is measured.
        rows: makes the rows; takes whether to be quick.
        draw: makes the plot, for a benchmark that has one.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help=QUICK)
    if draw is not None:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it, as PNG or SVG")
    options = parser.parse_args()
    print(summary(describe()))
    measured = rows(options.quick)
    print_table(measured, title)
    if draw is not None and options.plot is not None:
        draw(measured, options.plot)
