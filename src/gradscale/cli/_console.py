"""Output to the terminal: tables that fit it, and errors in one line instead of a traceback or typer's boxes."""

import math
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from gradscale.__main__ import INTERRUPTED

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


# `ClickException`: of click in older versions of typer, of typer's own copy of click in newer ones.
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]


class OneLineErrors(TyperGroup):
    """Commands whose errors are one line on standard error."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """Runs a command and exits.

        The exit code is 0 for success and for the help, 2 for wrong usage, 1 for a failure and 130 after Ctrl-C.
        """
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        for command in (self, *self.commands.values()):
            for option in command.params:
                if getattr(option, "is_flag", False):
                    option.metavar = ""  # newer versions of typer show `<bool>`, as if one had to follow
        try:
            code = super().main(given, *rest, standalone_mode=False, **settings)
        except CLICK_ERROR as error:
            show_error(_line(error))
            code = error.exit_code
        except OSError as error:  # such as a full disk
            show_error(described(error))
            code = FAILURE
        except MemoryError as error:
            show_error(f"There is not enough memory. {error}")
            code = FAILURE
        except typer.Abort:
            code = INTERRUPTED
        if not standalone_mode:
            return code
        sys.exit(code)


def _line(error: Any) -> str:
    """Returns the message of one of click's errors in one line, with the command that shows the help."""
    message = " ".join(error.format_message().split())
    ended = message if message.endswith((".", "?")) else f"{message}."
    context = getattr(error, "ctx", None)
    return f"{ended} See: {context.command_path} --help" if context else ended
