"""The commit that rows were made by."""

import subprocess
from pathlib import Path

CODE = ("src", "benchmarks/*.py", "benchmarks/study/*.py")
"""What a row depends on. The files that the study writes are no part of it."""


def commit(folder: Path) -> str | None:
    """Returns the short hash of the commit in `folder`, with a "+" if the code was changed since; None outside git."""
    known = _git(folder, "rev-parse", "--short", "HEAD")
    return None if known is None else known + ("+" if _git(folder, "status", "--porcelain", "--", *CODE) else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
