"""The command line as a whole: its help, its exit codes, and how it behaves in a pipe."""

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradscale import __version__
from gradscale.cli import app

COMMANDS = ("demo", "formats", "policies", "replay", "bench", "precisions", "doctor")


@functools.cache
def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Returns what came of `python -m gradscale` in a process of its own, with the flags 0 and 1 piped in."""
    command = [sys.executable, "-m", "gradscale", *arguments]
    surroundings = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run(command, input="0 1", env=surroundings, capture_output=True, text=True, check=False)


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(command in shown.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.output


def test_the_version_is_the_packages() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"gradscale {__version__}\n")


@pytest.mark.parametrize("arguments", [["nope"], ["formats", "--nope"], ["replay", "-p"]])
def test_wrong_usage_exits_with_2_and_no_traceback(arguments: Sequence[str]) -> None:
    shown = run(*arguments)
    assert shown.returncode == 2
    assert "Traceback" not in shown.stderr
    assert shown.stderr
    assert not shown.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--version"], __version__),
        (["formats"], "65504"),
        (["policies"], "growth_interval"),
        (["replay", "-p", "static:8"], "static: 8"),
        (["doctor"], "gradscale.numpy loads"),
    ],
)
def test_commands_run_in_a_process_of_their_own(arguments: Sequence[str], text: str) -> None:
    shown = run(*arguments)
    assert shown.returncode == 0, shown.stderr
    assert text in shown.stdout
    assert not shown.stderr


def test_the_installed_script_runs() -> None:
    script = Path(sys.executable).with_name("gradscale")
    if not script.exists():
        pytest.skip("gradscale can be imported here but is not installed")
    shown = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"gradscale {__version__}\n"


@pytest.mark.parametrize("arguments", [["formats"], ["policies"], ["replay", "-p", "static:8"]])
def test_output_in_a_pipe_fits_80_columns_and_has_no_colour_codes(arguments: Sequence[str]) -> None:
    shown = run(*arguments)
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "\x1b" not in shown.stdout


def test_no_color_is_respected_where_colour_is_forced() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert colour.search(run("--help", FORCE_COLOR="1", TERM="xterm").stdout)
    assert not colour.search(run("--help", FORCE_COLOR="1", TERM="xterm", NO_COLOR="1").stdout)


@pytest.mark.parametrize("arguments", [["policies"], ["replay", "--json", *["-p", "dynamic"] * 10]])
def test_a_reader_that_stops_early_causes_no_traceback(tmp_path: Path, arguments: Sequence[str]) -> None:
    flags = tmp_path / "flags"
    flags.write_text("0 1 " * 500)  # ten policies make more JSON of it than a pipe holds
    command = [sys.executable, "-m", "gradscale", *arguments]
    with (
        flags.open() as stdin,
        subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout
        assert process.stderr
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_bug_still_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(sys.modules["gradscale.cli.formats"], "table", broken)
    shown = CliRunner().invoke(app, ["formats"])
    assert isinstance(shown.exception, ValueError)


def test_the_documentation_has_a_section_for_every_command_and_its_commands_parse() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    assert all(f"## {command}\n" in page for command in COMMANDS)
    shown = [re.sub(r"^.*?gradscale ", "", block) for block in re.findall(r"```sh\n(.*)\n```", page)]
    assert len(shown) == 10
    for line in shown:
        shown = CliRunner().invoke(app, [*shlex.split(line), "--help"])
        assert shown.exit_code == 0, line
