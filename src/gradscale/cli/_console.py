"""Output to the terminal: tables that fit it, and usage errors in one line instead of a traceback."""

import math
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FAILURE = 1
"""Exit code where the command was right and could not be carried out, such as a package that is not installed."""

USAGE_ERROR = 2
"""Exit code for invalid input, as for an unknown option."""


def console() -> Console:
    """Returns a console on standard output. It has no colors where that is not a terminal, or `NO_COLOR` is set."""
    return Console(highlight=False)


def table(*columns: str, prose: int = 0) -> Table:
    """Returns an empty table whose last `prose` columns hold text; the others but the first hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        is_text = index == 0 or index >= len(columns) - prose
        made.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return made


def number(value: float) -> str:
    """Returns a scale as text, with large and small powers of two by their exponent.

    >>> number(65536.0), number(2.0**40), number(0.1), number(float("inf"))
    ('65536', '2^40', '0.1', 'inf')
    """
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 2.0**-4 <= value <= 2.0**20:
        return f"2^{exponent - 1}"
    return f"{value:.0f}" if value.is_integer() and value < 1e7 else f"{value:.6g}"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun.

    >>> counted(1, "step"), counted(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def as_text(name: str) -> str:
    """Returns a name from a file for a table: neither markup nor control characters, which a terminal would follow.

    >>> as_text("layer[0]\\x1b[2J")
    'layer[0]\\\\x1b[2J'
    """
    return escape("".join(one if one.isprintable() else ascii(one)[1:-1] for one in name))


@contextmanager
def usage_errors() -> Generator[None]:
    """Ends the program with a line on standard error when the user's input is invalid, or a package is missing for it.

    Only for the calls that take the user's input: elsewhere such an error is a bug, and must show its traceback.
    """
    try:
        yield
    except OSError as error:
        fail(described(error))
    except ImportError as error:
        fail(str(error), FAILURE)
    except (ValueError, TypeError) as error:
        fail(str(error))


def fail(message: str, code: int = USAGE_ERROR) -> NoReturn:
    """Ends the program with `message` on standard error."""
    show_error(message)
    raise typer.Exit(code)


def show_error(message: str) -> None:
    """Prints `message` as one line on standard error."""
    print(f"Error: {' '.join(message.split())}", file=sys.stderr)


def described(error: OSError) -> str:
    """Returns what went wrong with which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
