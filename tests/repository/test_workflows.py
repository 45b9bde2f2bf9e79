"""GitHub's workflows call the same commands as a developer does. Whether GitHub runs them is not tested here."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.matrix.rows import ROWS

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def commands(name: str) -> list[str]:
    return [step["run"] for step in steps(name) if "run" in step]


def pythons(name: str) -> list[str]:
    (version,) = (step["with"]["python-version"] for step in steps(name) if "setup-python" in step.get("uses", ""))
    return version.split()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_a_name_triggers_jobs_and_no_more_rights_than_reading(path: Path) -> None:
    content = workflow(path.stem)
    assert {"name", True, "jobs", "permissions"} <= set(content)  # YAML reads `on` as true
    assert content["permissions"] == {"contents": "read"}
    assert all({"runs-on", "steps"} <= set(job) for job in content["jobs"].values())


def test_a_change_runs_what_a_developer_runs() -> None:
    assert commands("ci") == [".ci/run"]
    assert pythons("ci") == ["3.11"]
    assert "on Python 3.11" in (ROOT / "constraints/main.txt").read_text()


def test_the_matrix_has_every_python_of_its_rows() -> None:
    assert [command.split()[:2] for command in commands("matrix")] == [["make", "test-matrix"]]
    assert set(pythons("matrix")) == {row.python for row in ROWS}


def test_a_release_is_checked_built_and_only_then_published() -> None:
    jobs = workflow("release")["jobs"]
    assert commands("release")[1:] == [".ci/run", "make dist"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert not [step for step in jobs["publish"]["steps"] if "run" in step]  # it publishes what was checked


def test_what_is_made_is_a_target() -> None:
    called = [command for path in WORKFLOWS for command in commands(path.stem)]
    called += (ROOT / ".ci/run").read_text().splitlines()
    made = {target for line in called for target in re.findall(r"\bmake ([a-z-]+)", line)}
    assert {"lint", "test", "dist", "test-matrix"} <= made <= TARGETS


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_form_has_what_github_asks_for(name: str) -> None:
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    assert all({"type", "id", "attributes"} <= set(field) and "label" in field["attributes"] for field in form["body"])


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
