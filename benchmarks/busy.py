"""A machine with one core less to give: a process that does nothing but spin."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It ends by itself when its parent is gone, so that not even a killed run leaves it behind.
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


@contextmanager
def one_core_busy() -> Iterator[subprocess.Popen[bytes]]:
    """Keeps one core busy for as long as the block runs, and yields the process that does."""
    spinner = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield spinner
    finally:
        spinner.kill()
        spinner.wait()
