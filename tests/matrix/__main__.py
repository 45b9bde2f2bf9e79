"""Runs the adapters' tests on the lowest and newest versions: python -m tests.matrix [ROW ...] [-- PYTEST ARGUMENTS]

For each row an environment is made, tested and deleted, one at a time. The table in the documentation gets a line for
each run; all output is kept in `.venv-matrix/<run>.log`. Exit code: 0 if all passed, 1 if a row failed, 2 if none
failed but one was not run, since its Python is missing (0 with --allow-missing).
With arguments of pytest the table is not written: part of the tests is no result of a row.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.matrix import interpreters, pins, table
from tests.matrix.environment import NotMade, environment, size_on_disk
from tests.matrix.outcome import Outcome, judged
from tests.matrix.rows import ROOT, ROWS, Row, Run, chosen

FOLDER = Path(os.environ.get("GRADSCALE_MATRIX_FOLDER", ROOT / ".venv-matrix"))
PAGE = ROOT / "docs" / "reference" / "versions.md"
WIDTH = 200  # of the lines of a failure that are shown: a test's name may hold a whole file
TIMEOUT_S = 25 * 60  # of one run; the longest takes a third of it on two free cores
ASK_VERSIONS = """
import importlib, json, platform, sys
shown = [f"{name} {importlib.import_module(name).__version__}" for name in sys.argv[1:]]
print(json.dumps([platform.python_version(), shown]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the adapters' tests on the lowest and the newest versions.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="all of them without one")
    parser.add_argument("--uv", default=shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--workers", default="2", help="of pytest")
    parser.add_argument("--allow-missing", action="store_true", help="a Python that is missing is no failure")
    parser.add_argument("--pin", action="store_true", help="resolve the pins of the rows anew, and run nothing")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    options.arguments = sys.argv[end + 1 :]  # of pytest
    try:
        rows = chosen(options.rows)
    except ValueError as error:
        parser.error(str(error))
    if options.pin:
        for row in rows:
            pins.write(row, options.uv)
        return 0
    return _run(rows, options)


def _run(rows: Sequence[Row], options: argparse.Namespace) -> int:
    table.lines_in(options.page.read_text())  # raises, before anything is made, if the page has no place for the table
    start, outcomes, largest = time.monotonic(), dict[str, Outcome](), 0
    FOLDER.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, _end)
    for row in rows:
        for run, outcome, size in _tested(row, options):
            outcomes[run.name], largest = outcome, max(largest, size)
            print(table.line_of(run, outcome), flush=True)
            if not options.arguments:
                table.write(options.page, ROWS, outcomes)
    took = (time.monotonic() - start) / 60
    print(f"{len(outcomes)} runs in {took:.0f} minutes; the largest environment took {largest / 1e9:.1f} GB")
    results = {outcome.result for outcome in outcomes.values()}
    if "failed" in results:
        return 1
    return 2 if "not run" in results and not options.allow_missing else 0


def _end(*_: object) -> None:
    """Ends the process by an exception, so that the tests that run are ended and their environment is deleted."""
    sys.exit(f"ended by signal {signal.SIGTERM}")


def _tested(row: Row, options: argparse.Namespace) -> Iterator[tuple[Run, Outcome, int]]:
    """Yields the outcome of each run of a row, with the bytes that its environment takes."""
    interpreter = interpreters.find(row.python)
    if interpreter is None:
        reason = f"no Python {row.python} here"
        print(f"{row.name}: {reason}; name one: PYTHONS=/path/to/python{row.python}", flush=True)
        yield from ((run, Outcome("not run", row.python, reason=reason), 0) for run in row.runs)
        return
    print(f"{row.name}: installing {row.pinned.relative_to(ROOT)} for {interpreter}", flush=True)
    try:
        with environment(row, interpreter, options.uv, FOLDER / "environment") as python:
            size = size_on_disk(FOLDER / "environment")
            for run in row.runs:
                yield run, _outcome(row, run, python, options), size
    except NotMade as error:
        print(error, flush=True)
        yield from ((run, Outcome("failed", row.python, reason="not installed"), 0) for run in row.runs)


def _outcome(row: Row, run: Run, python: Path, options: argparse.Namespace) -> Outcome:
    outside = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}  # of the environment that this process runs in
    variables = {name: value for name, value in os.environ.items() if name not in outside}
    variables |= {"GRADSCALE_ADAPTERS": ",".join(run.adapters), "PYTHONNOUSERSITE": "1", **run.environment}
    asked = subprocess.run(
        [str(python), "-c", ASK_VERSIONS, *row.shows], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    if asked.returncode:
        print(asked.stderr[-3000:], flush=True)
        return Outcome("failed", row.python, reason="an import failed")
    version, shown = json.loads(asked.stdout.splitlines()[-1])
    log = FOLDER / f"{run.name.replace(',', '').replace(' ', '-')}.log"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command += ["-n", options.workers, *run.paths, *options.arguments]
    code = _logged(command, variables, log)
    output = log.read_text(errors="replace")
    result, counts, reason = judged(code, output)
    if result == "failed":
        print(*(line[:WIDTH] for line in output.splitlines()[-40:]), f"all of it: {log}", sep="\n", flush=True)
    return Outcome(result, version, tuple(shown), counts, reason)


def _logged(command: Sequence[str], variables: dict[str, str], log: Path) -> int:
    """Runs a command with its output in a file, and returns its exit code. A timeout ends its whole group."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(TIMEOUT_S)
        except BaseException as error:  # also an interrupt: the workers are no children of the terminal
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                output.write(f"\nstopped after {TIMEOUT_S} s\n")
                return -signal.SIGKILL
            raise


if __name__ == "__main__":
    sys.exit(main())
