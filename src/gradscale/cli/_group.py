"""The group of all commands: errors in one line instead of typer's boxes, and the help where no command is named."""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from gradscale.__main__ import INTERRUPTED
from gradscale.cli._console import FAILURE, described, show_error

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
