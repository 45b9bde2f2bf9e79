"""`gradscale policies`."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.cli.policies import _meanings
from gradscale.peers import PEERS
from gradscale.peers.specs import POLICIES


@pytest.fixture(scope="module")
def output() -> str:
    shown = CliRunner().invoke(app, ["policies"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    return shown.output


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_is_listed_with_its_settings_and_defaults(output: str, name: str) -> None:
    assert f"{name}: " in output
    for field in dataclasses.fields(POLICIES[name]):
        assert field.name in output


@pytest.mark.parametrize("name", POLICIES)
def test_the_docstring_of_each_policy_explains_every_setting(name: str) -> None:
    assert _meanings(POLICIES[name]).keys() == {field.name for field in dataclasses.fields(POLICIES[name])}


def test_defaults_are_shown_as_a_person_reads_them(output: str) -> None:
    row = next(line.split() for line in output.splitlines() if line.split()[:1] == ["max_scale"])
    assert row[:2] == ["max_scale", "2^126"]
    assert "required" in output


@pytest.mark.parametrize("system", PEERS)
def test_each_system_is_listed_with_its_rules(output: str, system: str) -> None:
    assert f"\n{system}\n" in output
    assert all(variant in output for variant in PEERS[system].variants)


def test_a_preset_is_listed_with_the_settings_of_its_system(output: str) -> None:
    assert "scale_window=1000, min_scale=1, delayed_shift=2" in output


def test_json_has_every_policy_and_preset_with_its_settings() -> None:
    listed = json.loads(CliRunner().invoke(app, ["policies", "--json"]).stdout)
    assert list(listed["policies"]) == list(POLICIES)
    (scale,) = listed["policies"]["static"]["settings"]
    assert scale.keys() == {"name", "meaning"}  # it must be given
    interval = next(one for one in listed["policies"]["dynamic"]["settings"] if one["name"] == "growth_interval")
    assert interval == {
        "name": "growth_interval",
        "default": 2000,
        "meaning": "clean steps in a row before the scale grows.",
    }
    assert list(listed["presets"]) == list(PEERS)
    rules = [name for rule in listed["presets"]["torch"] for name in rule["rules"]]
    assert rules == list(PEERS["torch"].variants)
