"""Builds the package and checks it as a new user would get it: python -m tests.package

The wheel and the source distribution go into `dist/`. Their contents are checked, `twine check --strict` reads their
metadata, the wheel is installed into a clean environment with the core's dependencies alone, where a smoke test runs,
then with the command line. Last, some tests of the source distribution run from where it was unpacked.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.package.contents import ROOT, faults_of_source, faults_of_wheel, modules, names_in

DIST = ROOT / "dist"
PINS = ("--constraints", str(ROOT / "constraints" / "main.txt"))
BUILD_PINS = ("--build-constraints", str(ROOT / "constraints" / "build.txt"))
TOOLS = Path(sys.executable).parent
SMOKE = Path(__file__).with_name("smoke.py")
OF_SOURCE = ("tests/numpy", "tests/test_record.py", "src/gradscale/numpy")  # need no framework, and take seconds
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")


def main() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    uv = str(TOOLS / "uv")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _run(folder, uv, "build", "--quiet", *BUILD_PINS, "--out-dir", str(DIST), ".")
        wheel, source = next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))
        faults = faults_of_wheel(names_in(wheel), modules()) + faults_of_source(names_in(source), modules())
        if faults:
            print("\n".join(faults), file=sys.stderr)
            return 1
        _run(folder, str(TOOLS / "twine"), "check", "--strict", str(wheel), str(source))
        _check_wheel(folder, uv, wheel)
        _check_source(folder, uv, source)
    print(f"built and checked: {wheel.relative_to(ROOT)}, {source.relative_to(ROOT)}")
    return 0


def _check_wheel(folder: Path, uv: str, wheel: Path) -> None:
    """Runs the smoke test on the wheel, installed alone, and the command line, installed with its extra."""
    python = folder / "clean" / "bin" / "python"
    _run(folder, uv, "venv", "--quiet", "--python", sys.executable, str(folder / "clean"))
    install = (uv, "pip", "install", "--quiet", "--python", str(python), *PINS)
    _run(folder, *install, str(wheel))
    _run(folder, str(python), "-I", str(SMOKE))
    _run(folder, *install, f"gradscale[cli] @ {wheel.as_uri()}")
    _run(folder, str(python.with_name("gradscale")), "--version")


def _check_source(folder: Path, uv: str, source: Path) -> None:
    """Runs tests of the unpacked source distribution on its own code, in the environment that has the wheel."""
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    python = folder / "clean" / "bin" / "python"
    install = (uv, "pip", "install", "--quiet", "--python", str(python), *PINS)
    _run(folder, *install, *TEST_TOOLS)
    _run(folder, *install, *BUILD_PINS, "--no-deps", "-e", str(unpacked))
    _run(unpacked, str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *OF_SOURCE)


def _run(folder: Path, *command: str) -> None:
    """Runs a command; one that fails ends this process with its exit code.

    uv runs in the checkout, which it builds from; all else in `folder`, so that nothing is imported from the checkout.
    """
    print("+", " ".join(command).replace(str(folder), "$TMP").replace(f"{ROOT}/", ""), flush=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    where = ROOT if command[0].endswith("/uv") else folder
    ended = subprocess.run(command, cwd=where, env=variables | {"UV_NO_PROGRESS": "1"})
    if ended.returncode:
        sys.exit(ended.returncode)


if __name__ == "__main__":
    sys.exit(main())
