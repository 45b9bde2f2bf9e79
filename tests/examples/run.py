"""Runs an example once, however many tests look at what it prints."""

import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

KERAS_WARNINGS = ("error", "ignore:__array__ implementation doesn't accept:DeprecationWarning")
"""Keras 3.15 converts tensors in a way that numpy 2 frowns upon."""


@cache
def lines_printed(name: str) -> list[str]:
    """Returns what the example prints when it is run as a program.

    Args:
        name: of the file in `examples`, without its ending.
    """
    path = str(EXAMPLES / f"{name}.py")
    if name.startswith("keras_"):
        return _lines_of_a_process(path)
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue().splitlines()


def _lines_of_a_process(path: str) -> list[str]:
    """Returns what a program prints that needs a process of its own, as each has one Keras backend."""
    options = [option for warning in KERAS_WARNINGS for option in ("-W", warning)]
    env = {"KERAS_BACKEND": "torch"} | os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, *options, path], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{path} failed:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()
