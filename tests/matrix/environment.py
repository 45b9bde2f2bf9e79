"""One environment at a time: made from its pins, used, deleted with its cache."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.matrix.rows import ROOT, Row

BUILD_PINS = ROOT / "constraints" / "build.txt"


class NotMade(Exception):
    """An environment could not be made; the message is the end of what uv printed."""


@contextlib.contextmanager
def environment(row: Row, interpreter: str, uv: str, folder: Path) -> Iterator[Path]:
    """Yields the Python of a new environment with exactly the row's pins and this checkout of gradscale.

    uv links files from its cache, so the cache is inside the folder too: they are on the disk once, and go together.
    """
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "venv" / "bin" / "python"
    try:
        cache = folder / "cache"
        _run(cache, uv, "venv", "--python", interpreter, str(folder / "venv"))
        # Without dependencies: the file has them all, and one that it lacks is found by the check.
        install = (uv, "pip", "install", "--python", str(python), "--no-deps")
        _run(cache, *install, "-r", str(row.pinned))
        _run(cache, *install, "--build-constraints", str(BUILD_PINS), "-e", ".")
        _run(cache, uv, "pip", "check", "--python", str(python))
        yield python
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(cache: Path, *command: str) -> None:
    variables = os.environ | {"UV_CACHE_DIR": str(cache), "UV_NO_PROGRESS": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ended.returncode:
        raise NotMade(f"{' '.join(command)}\n{ended.stdout[-3000:]}")


def size_on_disk(folder: Path) -> int:
    """Returns the bytes that a folder takes, a file with several links once."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())
