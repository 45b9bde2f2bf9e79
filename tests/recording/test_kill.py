"""A process that is killed at a random moment leaves a record that reads, without the last second at most."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradscale.recording import writer
from gradscale.recording.form import Header, Step, read_line

FLUSH_S = 0.02
"""What stands for the second in most runs, so that they are short."""

PROGRAM = """
import os, sys, time
import numpy as np
from gradscale.numpy import LossScaler
from gradscale.recording import writer

path, flush_s, resumed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
writer.FLUSH_S = flush_s
scaler = LossScaler("dynamic:growth_interval=50", record=path)
if resumed:
    scaler.load_state_dict({**scaler.state_dict(), "state": {**scaler.state_dict()["state"], "applied": resumed}})
grads, bad = {"w": np.float16([1.0])}, {"a" * 50: np.float16([np.inf])}
while True:
    scaler.note(loss=0.5)
    scaler.step(bad if np.random.random() < 0.1 else grads)
    # Past Python's buffers: what was made, and when. It is there after a kill, too.
    os.write(1, b"%d %.6f\\n" % (int(scaler.state.applied) + int(scaler.state.skipped) - 1, time.monotonic()))
    time.sleep(np.random.random() * 0.002)
"""


def killed(path: Path, flush_s: float, wait_s: float, resumed: int = 0) -> tuple[list[tuple[int, float]], float]:
    """Runs a training loop, and kills it some time after its first step.

    Returns the steps that it made, each with its time, and the time of the kill.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), str(flush_s), str(resumed)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    time.sleep(wait_s)
    at = time.monotonic()
    os.kill(child.pid, signal.SIGKILL)
    rest, _ = child.communicate()
    made = [line.split() for line in (first + rest).splitlines(keepends=True) if line.endswith(b"\n")]
    return [(int(step), float(when)) for step, when in made], at


def read(path: Path) -> tuple[list[Header], list[int]]:
    """Returns the headers and the steps of a record, without a torn last line."""
    *whole, _ = path.read_bytes().split(b"\n")
    found = [read_line(line) for line in whole]  # it raises for any that does not read
    return [line for line in found if isinstance(line, Header)], [line.step for line in found if isinstance(line, Step)]


def check(path: Path, made: list[tuple[int, float]], at: float, flush_s: float, first: int) -> int:
    """Checks that a part of a record has all steps but the last ones, and returns how many of them are missing."""
    _, steps = read(path)
    part = steps[steps.index(first) :] if first in steps else []
    assert part == list(range(first, first + len(part)))
    missing = [when for step, when in made if step >= first + len(part)]
    # The machine may be busy with something else when the thread should write.
    assert not missing or at - missing[0] <= flush_s + 1.0, f"{at - missing[0]:.3f} s are missing"
    return len(missing)


def kill_and_resume(path: Path, flush_s: float, longest_s: float) -> int:
    """Kills a run, and the run that goes on from there. Returns how many steps are missing."""
    made, at = killed(path, flush_s, random.random() * longest_s)
    missing = check(path, made, at, flush_s, 0) if path.exists() else len(made)
    before = read(path)[1] if path.exists() else []
    count = 100_000  # past all that the first run has made
    made, at = killed(path, flush_s, random.random() * longest_s, resumed=count)
    headers, steps = read(path)
    assert steps[: len(before)] == before
    if count in steps:
        assert [header.resumed for header in headers] == [False] * bool(before) + [bool(before)]
    return missing + check(path, made, at, flush_s, count)


def test_a_run_that_is_killed_loses_at_most_the_last_second_and_can_be_resumed(tmp_path: Path) -> None:
    for number in range(3):
        kill_and_resume(tmp_path / f"{number}.jsonl", FLUSH_S, 0.3)
    made, at = killed(tmp_path / "longer.jsonl", FLUSH_S, 1.8)
    check(tmp_path / "longer.jsonl", made, at, FLUSH_S, 0)


def test_a_thread_writes_by_itself_and_ends_when_nothing_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FLUSH_S", 0.01)
    path = tmp_path / "run.jsonl"
    file = writer.RecordFile(str(path))
    for count in range(1, 4):
        file.add(f"{count}\n")
        while path.read_bytes().count(b"\n") < count or (count == 2 and file._thread is not None):
            time.sleep(0.01)  # for ever, if nothing does


def test_a_second_is_what_is_kept_in_memory() -> None:
    assert writer.FLUSH_S == 1.0


@pytest.mark.slow
def test_200_runs_that_are_killed_lose_at_most_the_last_second(tmp_path: Path) -> None:
    missing = [kill_and_resume(tmp_path / f"{number}.jsonl", FLUSH_S, 0.3) for number in range(90)]
    missing += [kill_and_resume(tmp_path / f"real {number}.jsonl", writer.FLUSH_S, 2.5) for number in range(10)]
    assert any(missing), "no kill came between two writes, so that nothing was tried"


def test_a_file_that_is_cut_anywhere_reads_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    file = writer.RecordFile(str(path))
    lines = [
        Header(gradscale="1", policy={}, state={}).line(),
        *(f'{{"step":{n},"scale":1.0,"status":"applied"}}\n' for n in range(3)),
    ]
    for line in lines:
        file.add(line)
    file.flush()
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        again = writer.RecordFile(str(path))
        headers, steps = read(path)
        assert steps == list(range(len(steps)))
        assert again.resumed == (len(headers) == 1)
