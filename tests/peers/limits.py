"""A child process with little memory and processor time, for files that would take more."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_MEMORY = 60 * 2**20
"""Bytes that reading may take, beyond those of Python, numpy and gradscale, which are less than 40 MB."""

MOST_CPU_S = 300
"""Ends a child that hangs. A loaded machine does not reach it, as it counts processor time."""


def run_in_child(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of the tests in a process of its own, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def limit_this_process(beyond: int) -> None:
    """Lets this process take `MOST_MEMORY` more than it has, and `beyond`; past that, Python raises `MemoryError`."""
    import resource  # which only Unix has

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_MEMORY + beyond
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
