"""Finding a Python of a given version on this machine."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

ASK = "import sys; print('%d.%d' % sys.version_info[:2])"


def candidates(version: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yields what may be a Python of this version: those that `PYTHONS` names, the PATH's, and those of pyenv."""
    yield from filter(None, environment.get("PYTHONS", "").split(os.pathsep))
    yield f"python{version}"
    pyenv = Path(environment.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from (str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


def find(version: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the first candidate that runs and is of this version; None if there is none.

    Each is run, not only looked up: a pyenv shim may be on the PATH with no such Python behind it.
    """
    return next((python for python in candidates(version, environment) if _version_of(python) == version), None)


def _version_of(python: str) -> str | None:
    try:
        ended = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None
