"""Trains small models with every policy, and compares them.

    python -m benchmarks.study            # continues the full form; hours
    python -m benchmarks.study --quick    # one seed, few steps; writes nothing
    python -m benchmarks.study --minutes 30 --workers 2
    python -m benchmarks.study --minutes 0    # only writes the tables
    python -m benchmarks.study --formats fp16 --rules torch auto    # only these runs
    python -m benchmarks.study --tasks held-out-3    # only those of one set of tasks that no rule was tuned on

Rows that are in `results.json` already are not run again, whatever commit made them. Delete those that a change
concerns.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.marks import fill
from benchmarks.study.commit import commit
from benchmarks.study.plan import FORMATS, cases, completed, source
from benchmarks.study.report import coverage, section
from benchmarks.study.results import Results
from benchmarks.study.rules import RULES
from benchmarks.study.tasks import SETS, TASKS
from benchmarks.study.training import Case
from benchmarks.study.workers import run_all

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
PAGE = FOLDER.parents[1] / "docs" / "understand" / "policies_study.md"


def main() -> None:
    """Runs the cases that are missing, and writes the results and the page; the quick form only prints."""
    options = _options()
    results = Results(None if options.quick else RESULTS)
    results.start({"command": "python -m benchmarks.study"} | _machine())
    planned = list(cases(options.quick))
    chosen = [case for case in planned if _is_chosen(case, options)]
    _run_missing(results, chosen, options.workers, time.monotonic() + options.minutes * 60)
    rows = completed(results.rows, planned)
    sections = [section(rows, held_out) for held_out in range(len(SETS))]
    text = "\n\n".join([coverage(rows, planned), *sections])
    print(text)
    if not options.quick:
        fill(PAGE, "study", text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains small models with every policy, and compares them.")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; write nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after this long")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    formats = ("fp32", *FORMATS)
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats, help="run no case of another format")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="run no case of another policy")
    parser.add_argument(
        "--tasks", nargs="+", choices=SETS, default=list(SETS), help="run no case of another set of tasks"
    )
    return parser.parse_args()


def _is_chosen(case: Case, options: argparse.Namespace) -> bool:
    name = list(SETS)[TASKS[case.task].held_out]
    return case.format in options.formats and case.rule in options.rules and name in options.tasks


def _machine() -> dict[str, str | None]:
    facts = {name: value for name, value in describe().items() if name not in ("load at the start", "threads", "jax")}
    return {"commit": commit(FOLDER.parents[1])} | facts


def _run_missing(results: Results, planned: list[Case], workers: int, end: float) -> None:
    """Runs the cases that are missing, those that are one run once, and writes each row as soon as it is there."""
    missing = [case for case in planned if source(case) == case and case.key not in results.rows]
    for case, row in run_all(missing, workers, end):
        results.add(case.key, row)
        figures = f"{row['skipped']} skipped, final {row['final']:.4g}, {row['cpu_s']} s"
        done = len(completed(results.rows, planned))
        print(f"{done} of {len(planned)} | {case.key}: {figures}", file=sys.stderr)


if __name__ == "__main__":
    main()
