"""The whole of it, with a stand-in for uv: what is made, run, deleted, written and reported."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.matrix import interpreters
from tests.matrix.environment import NotMade, environment, size_on_disk
from tests.matrix.rows import ROOT, ROWS
from tests.matrix.table import BEGIN, END, lines_in

FAKE_UV = """#!{python}
import os, pathlib, sys
if sys.argv[1] == "venv":
    binary = pathlib.Path(sys.argv[-1]) / "bin" / "python"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\\nexec {python} \\"$@\\"\\n")
    binary.chmod(0o755)
if {fails} and "install" in sys.argv:
    sys.exit("no such version")
"""

WAITING = """#!{python}
import json, os, sys, time
if "-c" in sys.argv:  # asked for versions
    print(json.dumps(["3.12.0", []]))
else:
    with open("{started}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "versions.md").write_text(f"{BEGIN}\n{END}\n")
    return tmp_path


def uv(folder: Path, *, fails: bool = False) -> str:
    path = folder / "uv"
    path.write_text(FAKE_UV.format(python=sys.executable, fails=fails))
    path.chmod(0o755)
    return str(path)


def python_3(folder: Path, version: str) -> str:
    """Makes a Python that says it is of another version."""
    path = folder / "bin" / "python"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


def call(folder: Path, *arguments: str, pythons: str) -> dict[str, Any]:
    """Returns how to run the matrix with the stand-in for uv, and nothing of this machine's interpreters."""
    page = str(folder / "versions.md")
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONS": pythons, "PATH": str(folder)}
    variables |= {"PYENV_ROOT": str(folder), "GRADSCALE_MATRIX_FOLDER": str(folder / "made")}
    command = [sys.executable, "-m", "tests.matrix", "--uv", str(folder / "uv"), "--page", page, *arguments]
    return {"args": command, "cwd": ROOT, "env": variables, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def matrix(folder: Path, *arguments: str, pythons: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    uv(folder, fails=fails)
    return subprocess.run(**call(folder, *arguments, pythons=pythons), text=True)


def test_a_row_without_its_python_is_not_run_and_the_exit_code_is_2(folder: Path) -> None:
    ended = matrix(folder, "numpy-1.26", pythons="")
    assert ended.returncode == 2, ended.stderr
    assert "**not run**: no Python 3.12 here" in lines_in((folder / "versions.md").read_text())["numpy-1.26"]
    assert matrix(folder, "numpy-1.26", "--allow-missing", pythons="").returncode == 0


def test_a_row_that_cannot_be_installed_fails_after_the_others_have_had_their_turn(folder: Path) -> None:
    ended = matrix(folder, "numpy-1.26", "torch-2.6", pythons=python_3(folder, "3.12"), fails=True)
    lines = lines_in((folder / "versions.md").read_text())
    assert ended.returncode == 1, ended.stderr
    assert "no such version" in ended.stdout
    assert "**failed**: not installed" in lines["numpy-1.26"]
    assert "no Python 3.11 here" in lines["torch-2.6"]
    assert not (folder / "made" / "environment").exists()


def test_an_unknown_row_is_refused_before_anything_is_made(folder: Path) -> None:
    ended = matrix(folder, "numpy-9", pythons="")
    assert ended.returncode == 2
    assert "Known: numpy-1.23" in ended.stderr
    assert not (folder / "made").exists()


def test_the_environment_is_deleted_with_its_cache(folder: Path) -> None:
    with environment(ROWS[0], sys.executable, uv(folder), folder / "made") as python:
        assert python.exists()
    assert not (folder / "made").exists()


def test_the_environment_is_deleted_if_it_cannot_be_made(folder: Path) -> None:
    failing = environment(ROWS[0], sys.executable, uv(folder, fails=True), folder / "made")
    with pytest.raises(NotMade, match="no such version"), failing:
        pass
    assert not (folder / "made").exists()


def test_a_candidate_that_does_not_run_or_is_of_another_version_is_passed_over(tmp_path: Path) -> None:
    found = python_3(tmp_path, "3.97")
    shim = tmp_path / "python3.97"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    pythons = os.pathsep.join([str(shim), sys.executable, "/no/such/python", found])
    assert interpreters.find("3.97", {"PYTHONS": pythons}) == found
    assert interpreters.find("3.96", {"PYTHONS": pythons}) is None


def test_a_file_with_two_names_is_on_the_disk_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1" * 100_000)
    before = size_on_disk(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    assert size_on_disk(tmp_path) == before >= 100_000


def test_with_arguments_of_pytest_the_page_stays(folder: Path) -> None:
    before = (folder / "versions.md").read_text()
    ended = matrix(folder, "numpy-1.26", "--", "-k", "a or b", pythons="")
    assert ended.returncode == 2, ended.stderr
    assert (folder / "versions.md").read_text() == before


def test_a_run_that_is_ended_ends_its_tests_and_deletes_the_environment(folder: Path) -> None:
    started, waiting = folder / "started", folder / "waiting"
    waiting.write_text(WAITING.format(python=sys.executable, started=started))
    waiting.chmod(0o755)
    script = Path(uv(folder))
    script.write_text(script.read_text().replace(f"exec {sys.executable}", f"exec {waiting}"))
    process = subprocess.Popen(**call(folder, "numpy-1.26", pythons=python_3(folder, "3.12")))
    while not started.exists() or not started.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not (folder / "made" / "environment").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
