"""Trains small models with every policy, and compares them.

    python -m benchmarks.study            # continues the full form; hours
    python -m benchmarks.study --quick    # one seed, few steps; writes nothing
    python -m benchmarks.study --minutes 30
    python -m benchmarks.study --minutes 0    # only writes the tables

Rows that are in `results.json` already are not run again.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from benchmarks.machine import describe
from benchmarks.marks import fill
from benchmarks.study.plan import cases
from benchmarks.study.report import claims, coverage, tables
from benchmarks.study.results import Results
from benchmarks.study.training import Case, run

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
PAGE = FOLDER.parents[1] / "docs" / "understand" / "policies_study.md"


def main() -> None:
    """Runs the cases that are missing, and writes the results and the page; the quick form only prints."""
    options = _options()
    torch.set_num_threads(1)
    results = Results(None if options.quick else RESULTS)
    results.start({"command": "python -m benchmarks.study"} | _machine())
    planned = list(cases(options.quick))
    _run_missing(results, planned, time.monotonic() + options.minutes * 60)
    print(claims(results.rows), tables(results.rows), coverage(results.rows, len(planned)), sep="\n\n")
    if not options.quick:
        text = "\n\n".join([coverage(results.rows, len(planned)), claims(results.rows), tables(results.rows)])
        fill(PAGE, "study", text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains small models with every policy, and compares them.")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; write nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after this long")
    return parser.parse_args()


def _machine() -> dict[str, str]:
    return {name: value for name, value in describe().items() if name not in ("load at the start", "threads", "jax")}


def _run_missing(results: Results, planned: list[Case], end: float) -> None:
    for case in planned:
        if case.key in results.rows:
            continue
        if time.monotonic() >= end:
            break
        row = run(case)
        results.add(case.key, row)
        print(f"{case.key}: {row['skipped']} skipped, final {row['final']:.4g}, {row['seconds']} s", file=sys.stderr)


if __name__ == "__main__":
    main()
