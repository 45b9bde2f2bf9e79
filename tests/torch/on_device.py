"""Runs tests/torch on a device, each file in a process of its own: python -m tests.torch.on_device --device sim

torch, pytest and its plugins are imported once, and every process is forked from there. So a file cannot disturb
another one by what it changes in torch, and one that crashes is a failure like any other. Prints the output of files
that failed, how many tests were skipped and why, and one line with all counts; the exit code is 1 if a file failed.
"""

import argparse
import contextlib
import gc
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch._dynamo  # the first optimizer imports it

import gradscale.torch

IMPORTED = (torch._dynamo, gradscale.torch)  # before the first fork: they take seconds
FOLDER = Path(__file__).parent
NOTHING_FAILED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class Tally:
    """A pytest plugin that counts tests by outcome, and those that are skipped by reason."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.skipped:
            self.outcomes["xfailed" if hasattr(report, "wasxfail") else "skipped"] += 1
        elif report.when == "call":
            self.outcomes[report.outcome] += 1
        elif report.failed:
            self.outcomes["errors"] += 1


class File:
    """A test file and the process that runs it."""

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        context = multiprocessing.get_context("fork")
        self.path = path
        self.output = tempfile.TemporaryFile()
        self.results, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(str(path), arguments, self.output.fileno(), sender))
        self.process.start()
        sender.close()  # this process's copy: the end of the other one is then the end of the pipe

    def finish(self, tally: Tally) -> bool:
        """Adds what was counted to `tally`, prints the output of a failure, and returns whether the file passed."""
        code = None
        try:
            code, outcomes, reasons = self.results.recv()
            tally.outcomes += outcomes
            tally.reasons += reasons
        except EOFError:
            tally.outcomes["crashed"] += 1
        self.process.join()
        passed = code in NOTHING_FAILED
        if not passed:
            self.output.seek(0)
            print(self.output.read().decode(errors="replace"))
            print(f"{self.path}: " + ("crashed" if code is None else "failed") + f", exit code {self.process.exitcode}")
        return passed


def _run(path: str, arguments: Sequence[str], output: int, sender: Connection) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    tally = Tally()
    code = pytest.main(["-q", *arguments, path], plugins=[tally])
    sys.stdout.flush()
    sender.send((code, tally.outcomes, tally.reasons))


def _prepare() -> None:
    """Does once what every file would: load the plugins and `conftest.py`, and look through all that was imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", str(FOLDER / "conftest.py")])
    gc.collect()
    gc.freeze()  # or else every collection in every process, and pytest makes many, goes over torch's objects again


def run(paths: Sequence[Path], arguments: Sequence[str], workers: int, tally: Tally) -> Iterator[bool]:
    """Runs every file, `workers` at a time, and yields whether it passed."""
    waiting, running = list(paths), dict[int, File]()
    while waiting or running:
        while waiting and len(running) < workers:
            file = File(waiting.pop(0), arguments)
            running[file.process.sentinel] = file
        for sentinel in wait(list(running)):
            yield running.pop(sentinel).finish(tally)  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs tests/torch on a device, each file in a process of its own.")
    parser.add_argument("--device", default="sim")
    parser.add_argument("--workers", type=int, default=2)
    options, rest = parser.parse_known_args()
    given = [Path(argument) for argument in rest if Path(argument).exists()]
    arguments = [f"--device={options.device}", *(argument for argument in rest if not Path(argument).exists())]
    start, tally = time.monotonic(), Tally()
    _prepare()
    passed = list(run(list(_files(given or [FOLDER])), arguments, max(1, options.workers), tally))
    for reason, count in tally.reasons.most_common():
        print(f"skipped {count}: {reason}")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.outcomes.items()))
    print(f"{counts} on {options.device}, {len(passed)} files, in {time.monotonic() - start:.0f}s")
    return 0 if all(passed) else 1


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from [path] if path.is_file() else sorted(path.rglob("test_*.py"))


if __name__ == "__main__":
    sys.exit(main())
