"""The command line: one module for each subcommand."""

from gradscale._extras import require

require("The command line", "typer", "rich", "packaging", extra="cli")

from typing import Annotated

import typer

from gradscale import __version__
from gradscale.cli._console import OneLineErrors
from gradscale.cli.calibrate import calibrate
from gradscale.cli.check_fp16 import check_fp16
from gradscale.cli.doctor import doctor
from gradscale.cli.formats import formats
from gradscale.cli.policies import policies
from gradscale.cli.replay import replay
from gradscale.cli.report import explain_log, report, tune

app = typer.Typer(
    name="gradscale",
    cls=OneLineErrors,
    help="Loss scaling for mixed-precision training.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (formats, policies, replay, tune, report, calibrate, doctor):
    app.command()(command)
app.command("check-fp16")(check_fp16)
app.command("explain-log")(explain_log)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"gradscale {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Loss scaling for mixed-precision training."""


def main() -> None:
    """Runs the command line and exits, with the codes of `OneLineErrors.main`."""
    app(prog_name="gradscale")
