"""The command line as a whole: its help, its exit codes, and how it behaves in a pipe."""

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from gradscale import __version__
from gradscale.__main__ import main
from gradscale.cli import app

COMMANDS = ("formats", "policies", "replay", "calibrate", "doctor")


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


@pytest.mark.parametrize("command", ["policies", "calibrate", "doctor", "check-fp16"])
def test_flags_are_shown_without_a_value(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"}).output
    (line,) = (line for line in shown.splitlines() if "--json" in line and "--json has" not in line)
    assert "<bool>" not in line
    assert "BOOL" not in line


def test_the_version_is_the_packages() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"gradscale {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_no_command_shows_the_help_and_exits_with_0(arguments: Sequence[str]) -> None:
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "Usage: gradscale" in shown.stdout
    assert not shown.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nope"], "No such command 'nope'. See: gradscale --help"),
        (["replya"], "No such command 'replya'"),
        (["--nope"], "No such option: --nope"),
        (["formats", "--nope"], "No such option: --nope. See: gradscale formats --help"),
        (["formats", "extra"], "Got unexpected extra argument"),
        (["replay", "-p"], "Option '-p' requires an argument."),
        (["replay", "a", "b"], "`--policy` 'b': there is no policy of that name"),
    ],
)
def test_wrong_usage_is_reported_in_one_line_and_exits_with_2(arguments: Sequence[str], text: str) -> None:
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 2
    assert not shown.stdout
    assert len(shown.stderr.splitlines()) == 1
    assert shown.stderr.startswith(f"Error: {text}")


def test_wrong_usage_is_one_line_in_a_process_of_its_own() -> None:
    shown = run("nope")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "Error: No such command 'nope'. See: gradscale --help\n"


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (OSError(28, "No space left on device", "plot.png"), "Error: plot.png: No space left on device\n", 1),
        (MemoryError("Unable to allocate 9 GiB"), "Error: There is not enough memory. Unable to allocate 9 GiB\n", 1),
        (KeyboardInterrupt(), "", 130),
    ],
)
def test_a_failure_is_at_most_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, line: str, code: int
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["gradscale.cli.formats"], "table", fails)
    shown = CliRunner().invoke(app, ["formats"])
    assert (shown.exit_code, shown.stderr) == (code, line)


@pytest.mark.parametrize("missing", ["typer", "rich", "packaging"])
def test_without_the_packages_of_the_extra_one_line_names_it(missing: str) -> None:
    code = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_module('gradscale', run_name='__main__')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr == (
        f'Error: The command line needs {missing}, which is not installed. Run: pip install "gradscale[cli]"\n'
    )


def test_ctrl_c_while_modules_are_imported_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "gradscale.cli", Interrupted("gradscale.cli"))
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


def test_the_shell_completes_commands_and_options() -> None:
    asked = {"_GRADSCALE_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert run(**asked, COMP_WORDS="gradscale re").stdout.split() == ["replay", "report"]
    assert "--json" in run(**{**asked, "COMP_CWORD": "2"}, COMP_WORDS="gradscale formats --").stdout.split()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--version"], __version__),
        (["formats"], "65504"),
        (["policies"], "headroom"),
        (["replay", "-p", "static:8"], "static: 8"),
        pytest.param(["doctor"], "gradscale.numpy loads", marks=pytest.mark.slow),  # and all other adapters too
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
    color = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert color.search(run("--help", FORCE_COLOR="1", TERM="xterm").stdout)
    assert not color.search(run("--help", FORCE_COLOR="1", TERM="xterm", NO_COLOR="1").stdout)


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
    assert len(shown) == 11
    for line in shown:
        shown = CliRunner().invoke(app, [*shlex.split(line), "--help"])
        assert shown.exit_code == 0, line
