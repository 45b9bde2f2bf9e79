"""The rows: the whole supported range is stated in pyproject.toml, and the rows reach from its lower bounds on."""

import re
import tomllib

import pytest
from tests.conformance.adapters import REGISTERED
from tests.matrix.rows import ROOT, ROWS, Row, chosen

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNTESTED_EXTRAS = {"onnx", "demo", "report"}  # of tools around the library, not of adapters
REQUIREMENT = re.compile(r"([A-Za-z0-9_-]+)\s*(?:>=|==)\s*([\d.]+)")


def pins_of(row: Row) -> dict[str, str]:
    lines = [line.split("==") for line in row.pinned.read_text().splitlines() if line and not line.startswith("#")]
    return {normal(name): version for name, version in lines}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, without zeros at the end."""
    numbers = [int(part) for part in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def lower_bounds(extra: str) -> dict[str, tuple[int, ...]]:
    """Returns the lower bounds of an extra, or of gradscale itself, by package."""
    wanted = PROJECT["dependencies"] if extra == "core" else PROJECT["optional-dependencies"][extra]
    return {normal(m[1]): release(m[2]) for each in wanted if (m := REQUIREMENT.match(each))}


def rows_named(*, lowest: str) -> list[Row]:
    return [row for row in ROWS if lowest in row.lowest]


@pytest.mark.parametrize("extra", ["core", *sorted(set(PROJECT["optional-dependencies"]) - UNTESTED_EXTRAS)])
def test_the_lowest_row_of_an_extra_has_its_lower_bounds(extra: str) -> None:
    (row,) = rows_named(lowest=extra)
    pins = {name: release(version) for name, version in pins_of(row).items()}
    assert {name: pins[name] for name in lower_bounds(extra)} == lower_bounds(extra)


def test_the_pythons_reach_from_the_lower_bound_to_the_newest_that_is_claimed() -> None:
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", line)]
    assert {row.python for row in ROWS} == set(classifiers)
    assert PROJECT["requires-python"] == f">={min(classifiers, key=release)}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_package_of_a_row_has_an_exact_version(row: Row) -> None:
    lines = [line for line in row.pinned.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", line)] == []
    assert {"pytest", "hypothesis", "pytest-xdist", "numpy", "ml-dtypes"} <= set(pins_of(row))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_pins_of_a_row_are_what_it_asks_for(row: Row) -> None:
    asked = {normal(m[1]): m[2] for each in row.requires if (m := re.fullmatch(r"([\w-]+)==(.*)", each))}
    assert {name: pins_of(row)[name] for name in asked} == asked


def test_what_a_row_runs_exists() -> None:
    for row in ROWS:
        for run in row.runs:
            assert [path for path in run.paths if not (ROOT / path).exists()] == []
            assert set(run.adapters) <= set(REGISTERED)


def test_every_adapter_of_the_conformance_table_runs_in_a_row() -> None:
    assert {adapter for row in ROWS for run in row.runs for adapter in run.adapters} == set(REGISTERED)


def test_no_file_of_pins_is_left_over() -> None:
    pinned = {row.pinned for row in ROWS}
    assert {path for path in (ROOT / "constraints" / "matrix").iterdir()} <= pinned


def test_rows_are_chosen_by_name_in_their_order() -> None:
    assert [row.name for row in chosen(["torch-newest", "numpy-1.26"])] == ["numpy-1.26", "torch-newest"]
    assert chosen([]) == list(ROWS)


def test_a_name_that_no_row_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Received: torch-9\. Known: numpy-1\.23"):
        chosen(["torch-9"])


def newest(package: str) -> str:
    """Returns the highest version of a package in any row, as major.minor."""
    versions = [pins[package] for row in ROWS if package in (pins := pins_of(row))]
    return ".".join(max(versions, key=release).split(".")[:2])


def test_the_page_states_the_range_from_the_lower_bounds_to_the_newest_rows() -> None:
    page = (ROOT / "docs/reference/versions.md").read_text().partition("## What was run")[0]
    stated = re.findall(r"^\| (\w+)[^|]*\| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    pythons = sorted((row.python for row in ROWS), key=release)
    mxnet = lower_bounds("mxnet")["mxnet"]  # there will be no newer one
    assert {name: (release(low), release(high)) for name, low, high in stated} == {
        "Python": (release(PROJECT["requires-python"].removeprefix(">=")), release(pythons[-1])),
        "PyTorch": (lower_bounds("torch")["torch"], release(newest("torch"))),
        "JAX": (lower_bounds("jax")["jax"], release(newest("jax"))),
        "Keras": (lower_bounds("keras")["keras"], release(newest("keras"))),
        "MXNet": (mxnet, mxnet),
        "numpy": (lower_bounds("core")["numpy"], release(newest("numpy"))),
    }


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "keras", "mxnet"])
def test_page_says_on_which_pythons_a_framework_is_run(framework: str) -> None:
    pythons = sorted({row.python for row in ROWS if row.name.startswith(f"{framework}-")})
    named = " and ".join(filter(None, [", ".join(pythons[:-1]), pythons[-1]]))
    page = " ".join((ROOT / "docs/reference/versions.md").read_text().split())
    assert re.search(rf"\b{framework} on {re.escape(named)}[;,]", page)
