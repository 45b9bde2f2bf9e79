"""Resolving the pins of a row with uv."""

import subprocess
import tomllib

from tests.matrix.rows import ROOT, Row

HEADER = "# The row {name} of `make test-matrix`, on Python {python} and Linux. Written by `make matrix-pins`.\n"


def write(row: Row, uv: str) -> None:
    """Writes the newest versions that `row.requires` and gradscale's own bounds allow. A shared file is left alone."""
    if row.pins.name:
        print(f"{row.name}: keeps {row.pinned.relative_to(ROOT)}, which `make pins` writes")
        return
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = "\n".join([*groups["test"], *row.requires])
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", row.python]
    command += ["--only-binary", ":all:", *(["--extra", row.extra] if row.extra else []), "pyproject.toml", "-"]
    ended = subprocess.run(command, cwd=ROOT, input=wanted, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{row.name}: {ended.stderr}")
    row.pinned.write_text(HEADER.format(name=row.name, python=row.python) + ended.stdout)
    print(f"{row.name}: {row.pinned.relative_to(ROOT)}")
