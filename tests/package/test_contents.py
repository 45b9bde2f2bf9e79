"""The check of what the built files hold. `make dist` runs it on real ones."""

import io
import tarfile
import zipfile
from pathlib import Path

from tests.package.contents import (
    FOLDERS_OF_SOURCE,
    NEEDED_BY_TESTS,
    faults_of_source,
    faults_of_wheel,
    modules,
    names_in,
)

PACKAGE = {"gradscale/__init__.py", "gradscale/py.typed", "gradscale/torch/scaler.py"}
METADATA = {f"gradscale-1.dist-info/{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE", "RECORD")}
SOURCE = {f"src/{name}" for name in PACKAGE} | set(NEEDED_BY_TESTS) | {f"{each}/file" for each in FOLDERS_OF_SOURCE}


def test_a_wheel_with_the_package_alone_has_no_faults() -> None:
    assert faults_of_wheel(PACKAGE | METADATA, PACKAGE) == []


def test_what_a_wheel_lacks_is_named() -> None:
    lacking = PACKAGE | METADATA - {"gradscale-1.dist-info/licenses/LICENSE"}
    assert faults_of_wheel(lacking, PACKAGE) == ["the wheel lacks licenses/LICENSE"]
    untyped = PACKAGE - {"gradscale/py.typed"}
    assert faults_of_wheel(untyped | METADATA, untyped) == ["the wheel lacks gradscale/py.typed"]
    faults = faults_of_wheel(PACKAGE - {"gradscale/torch/scaler.py"} | METADATA, PACKAGE)
    assert faults == ["the wheel lacks gradscale/torch/scaler.py"]


def test_tests_in_a_wheel_are_a_fault() -> None:
    faults = faults_of_wheel(PACKAGE | METADATA | {"tests/test_a.py"}, PACKAGE)
    assert faults == ["the wheel has tests/test_a.py, which is no part of the package"]


def test_a_source_distribution_has_its_tests_and_no_environment() -> None:
    assert faults_of_source(SOURCE, PACKAGE) == []
    without = {name for name in SOURCE if not name.startswith("tests/")}
    assert faults_of_source(without, PACKAGE) == ["the source distribution lacks tests/"]
    assert faults_of_source(SOURCE | {".venv/bin/python"}, PACKAGE) == ["the source distribution has .venv"]


def test_the_package_has_its_type_marker_and_no_compiled_files() -> None:
    found = modules()
    assert {"gradscale/__init__.py", "gradscale/py.typed", "gradscale/torch/scaler.py"} <= found
    assert not [name for name in found if name.endswith(".pyc")]


def test_archives_are_read(tmp_path: Path) -> None:
    wheel, source = tmp_path / "gradscale-1-py3-none-any.whl", tmp_path / "gradscale-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gradscale/__init__.py", "")
    with tarfile.open(source, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("gradscale-1/src/gradscale/__init__.py"), io.BytesIO())
    assert names_in(wheel) == ["gradscale/__init__.py"]
    assert names_in(source) == ["src/gradscale/__init__.py"]
