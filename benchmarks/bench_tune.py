"""Tunes settings over a recorded run, against one replay for each of the candidates.

Claim:    `tune` tries 10,000 candidates over 10,000 steps in less than 10 seconds of processor time.
Baseline: `predict`, which runs the compiled rule of one candidate at a time.
Machine:  printed with the results.
Command:  python -m benchmarks.bench_tune [--quick]
Caveats:  the baseline predicts 20 of the candidates, and its time is multiplied. Seconds are processor time, so that
          other processes disturb less; on an idle machine that is the time on the clock. The gradients are drawn.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.alone import run_alone
from benchmarks.rows import Row
from tests.recording.made import peaks, trained

from gradscale import Headroom
from gradscale.recording.reader import Run, read_run
from gradscale.report.tune import tune
from gradscale.report.what_if import predict

SECONDS = 10.0
SHOWN = 20


def seconds(run: Callable[[], object]) -> float:
    """Returns how much processor time `run` takes."""
    start = time.process_time()
    run()
    return time.process_time() - start


def recorded(steps: int) -> Run:
    """Returns a run of drawn gradients."""
    with tempfile.TemporaryDirectory() as folder:
        return read_run(trained(Path(folder), Headroom(), peaks(steps)))


def rows(quick: bool) -> list[Row]:
    """Returns one row."""
    size, steps = (500, 500) if quick else (10_000, 10_000)
    run = recorded(steps)
    fast = seconds(lambda: tune([run], size))
    few = [each.policy for each in tune([run], SHOWN)]
    slow = seconds(lambda: predict(run, few)) / len(few) * size
    return [
        Row(
            f"tune, {size:,} candidates, {steps:,} steps",
            "one at a time",
            measured=fast,
            goal=None if quick else SECONDS,
            unit="s",
            baseline_measured=slow,
        )
    ]


if __name__ == "__main__":
    run_alone("Tuning over a recorded run", rows)
