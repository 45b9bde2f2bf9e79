"""The benchmark of the host's time: every side makes steps on the stubbed device, which computes nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", minversion="2.10")  # the first that simulates a device

PROGRAM = """
from benchmarks import stubbed

stubbed.install()
from benchmarks.bench_torch_host_time import BLOCK, part_of_the_scaler, sides

for clip in (None, 1.0):
    made = sides(3, clip)
    seconds = {name: [side.turn() for _ in range(2 * BLOCK + 1)] for name, side in made.items()}
    assert {len(turns) for turns in part_of_the_scaler(seconds).values()} == {2}
print(*made, sep=", ")
"""


def test_every_side_makes_steps_on_the_stubbed_device() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "torch GradScaler, LossScaler, dynamic, LossScaler, auto, drop-in, no scaling\n"
