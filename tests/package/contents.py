"""What a wheel and a source distribution must hold, and must not."""

import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
NEEDED_BY_TESTS = ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "Makefile", "conftest.py", "mkdocs.yml")
FOLDERS_OF_SOURCE = ("src", "tests", "docs", "examples", "benchmarks", "constraints")


def names_in(archive: Path) -> list[str]:
    """Returns the files of a wheel or of a source distribution; of the latter without the folder they are all in."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as source:
        return [name.partition("/")[2] for name in source.getnames()]


def modules(root: Path = ROOT) -> set[str]:
    """Returns the files of the package, as a wheel names them."""
    folder = root / "src"
    files = (path for path in (folder / "gradscale").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in files}


def faults_of_wheel(names: Iterable[str], expected: set[str]) -> list[str]:
    """Returns what is wrong with the files of a wheel: it has the package, its type marker, its metadata, no more."""
    names = set(names)
    metadata = {name for name in names if PurePosixPath(name).parts[0].endswith(".dist-info")}
    faults = [f"the wheel lacks {name}" for name in sorted((expected | {"gradscale/py.typed"}) - names)]
    faults += [f"the wheel has {name}, which is no part of the package" for name in sorted(names - metadata - expected)]
    parts = ("METADATA", "entry_points.txt", "licenses/LICENSE")
    faults += [f"the wheel lacks {part}" for part in parts if not any(name.endswith(part) for name in metadata)]
    return faults


def faults_of_source(names: Iterable[str], expected: set[str]) -> list[str]:
    """Returns what is wrong with the files of a source distribution: it can run its tests, and has no environment."""
    names = set(names)
    folders = {PurePosixPath(name).parts[0] for name in names if name}
    needed = {f"src/{name}" for name in expected} | set(NEEDED_BY_TESTS)
    faults = [f"the source distribution lacks {name}" for name in sorted(needed - names)]
    faults += [f"the source distribution lacks {name}/" for name in FOLDERS_OF_SOURCE if name not in folders]
    unwanted = sorted(name for name in folders if name.startswith(".venv") or name in ("dist", "site"))
    return faults + [f"the source distribution has {name}" for name in unwanted]
