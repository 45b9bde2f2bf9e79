"""`gradscale policies`."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.cli.policies import _meanings
from gradscale.peers import PEERS
from gradscale.peers.specs import POLICIES


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["policies", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("name", [*POLICIES, *PEERS])
def test_each_policy_and_system_is_one_line_of_the_list(name: str) -> None:
    assert [line.split()[0] for line in shown().splitlines() if line.split()[:1] == [name]] == [name]
    assert "growth_interval" not in shown()


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_shown_by_name_with_its_settings_and_defaults(name: str) -> None:
    output = shown(name)
    assert output.startswith(f"{name}: ")
    for field in dataclasses.fields(POLICIES[name]):
        assert field.name in output


def test_a_name_that_is_none_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["policies", "dynamc"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "There is no policy or system 'dynamc'. Did you mean 'dynamic'?" in result.stderr


@pytest.mark.parametrize("name", POLICIES)
def test_the_docstring_of_each_policy_explains_every_setting(name: str) -> None:
    assert _meanings(POLICIES[name]).keys() == {field.name for field in dataclasses.fields(POLICIES[name])}


def test_defaults_are_shown_as_a_person_reads_them() -> None:
    row = next(line.split() for line in shown("dynamic").splitlines() if line.split()[:1] == ["max_scale"])
    assert row[:2] == ["max_scale", "2^126"]
    assert "required" in shown("static")


@pytest.mark.parametrize("system", PEERS)
def test_a_system_is_shown_by_name_with_its_rules(system: str) -> None:
    output = shown(system)
    assert output.startswith(f"{system}\n")
    assert all(variant in output for variant in PEERS[system].variants)


def test_a_preset_is_shown_with_the_settings_of_its_system() -> None:
    assert "scale_window=1000, min_scale=1, delayed_shift=2" in shown("deepspeed")


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
