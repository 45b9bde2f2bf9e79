"""Runs the benchmarks and puts all their rows into one table, with goals.

    python -m benchmarks.run                              # all of them
    python -m benchmarks.run benchmarks/bench_replay.py   # one

Every `bench_*.py` has a function `rows(quick)`. Nothing is written unless a file is named.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.alone import QUICK
from benchmarks.busy import one_core_busy
from benchmarks.machine import describe, summary
from benchmarks.marks import check_marks, fill
from benchmarks.rows import Row
from benchmarks.table import count_met, markdown, print_table


def main() -> None:
    """Measures, prints the table, and writes what was asked for. Ends with 1 if `--strict` and a goal was missed."""
    options = _options()
    facts = describe()
    print(summary(facts))
    with one_core_busy() if options.busy else nullcontext():
        measured = {path.stem: _measured(path, options.quick) for path in options.files}
    rows = [row for found in measured.values() for row in found]
    print_table(rows, _title(options))
    if options.json:
        options.json.write_text(json.dumps(_record(measured, facts, options), indent=2) + "\n", encoding="utf-8")
    if options.markdown:
        fill(options.markdown, _place(options), f"{markdown(rows)}\n\n{count_met(rows)}. On: {summary(facts)}.")
    _draw(rows, options)
    sys.exit(options.strict and any(row.met is False for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the benchmarks, and prints one table with goals.")
    parser.add_argument("files", nargs="*", type=Path, help="which to run; by default all bench_*.py beside this file")
    parser.add_argument("--quick", action="store_true", help=QUICK)
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--strict", action="store_true", help="end with code 1 if a goal is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table between this file's marks")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw six of the rows as bars, as PNG or SVG")
    parser.add_argument("--growth", type=Path, metavar="FILE", help="draw the cost of a parameter as models grow")
    options = parser.parse_args()
    options.files = options.files or sorted(Path(__file__).parent.glob("bench_*.py"))
    if options.markdown:
        check_marks(options.markdown, _place(options))
    return options


def _place(options: argparse.Namespace) -> str:
    """Returns the name of the marks that the table goes between."""
    return "busy" if options.busy else "quiet"


def _measured(path: Path, quick: bool) -> list[Row]:
    """Returns the rows of one file, and prints to stderr how long it took."""
    start = time.perf_counter()
    found = _rows_function(path)(quick)
    print(f"{path.stem}: {len(found)} rows in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return found


def _rows_function(path: Path) -> Callable[[bool], list[Row]]:
    name = f"benchmarks.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"A benchmark must be a Python file with a function `rows`. Received: {path}.")
    module = importlib.util.module_from_spec(spec)
    # Classes, and processes that a benchmark starts, look up the module by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.rows


def _title(options: argparse.Namespace) -> str:
    conditions = [name for name in ("quick", "busy") if getattr(options, name)]
    return "Benchmarks" + (f" ({', '.join(conditions)})" if conditions else "")


def _record(measured: dict[str, list[Row]], facts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Returns everything that was found, as plain values."""
    rows = [{"file": file, **asdict(row), "met": row.met} for file, found in measured.items() for row in found]
    return {"machine": facts, "quick": options.quick, "busy": options.busy, "rows": rows}


def _draw(rows: Sequence[Row], options: argparse.Namespace) -> None:
    if options.plot or options.growth:
        from benchmarks.plots import (  # here, since drawing needs a package that measuring does not
            draw_bars,
            draw_growth,
        )

        if options.plot:
            draw_bars(rows, options.plot)
        if options.growth:
            draw_growth(rows, options.growth)


if __name__ == "__main__":
    main()
