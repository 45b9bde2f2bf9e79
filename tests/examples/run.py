"""Runs an example once, however many tests look at what it prints."""

import runpy
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def lines_printed(name: str) -> list[str]:
    """Returns what the example prints when it is run as a program.

    Args:
        name: of the file in `examples`, without its ending.
    """
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue().splitlines()
