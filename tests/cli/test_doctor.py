"""`gradscale doctor`: what it finds, and that it does not fail on what is broken."""

import importlib.metadata
import json
import platform
import re
import sys
import tomllib
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner, Result

from gradscale import __version__
from gradscale.cli import app
from gradscale.cli._requirements import CORE, TRAINERS, Package, installed, packages_by_extra
from gradscale.cli.doctor import Finding, devices, examine, examine_trainer

DOCTOR = sys.modules["gradscale.cli.doctor"]
PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
HERE, OLD, ABSENT = (
    Package("there", ">=1", "2.0", True),
    Package("old", ">=2.6", "2.5.1", False),
    Package("no", "", None, False),
)


def doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str, **extras: list[Package]) -> Result:
    """Runs the command where these extras are all there is; a trainer is installed if it has one, with its name."""
    monkeypatch.setattr(DOCTOR, "packages_by_extra", lambda: extras)
    monkeypatch.setattr(sys.modules["gradscale.cli._requirements"], "installed", lambda name: None)
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "120"})


def raising(error: Exception) -> Any:
    def raise_it(*_: object) -> None:
        raise error

    return raise_it


def test_it_shows_versions_adapters_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = doctor(monkeypatch, core=[HERE], demo=[HERE, ABSENT])
    assert shown.exit_code == 0, shown.output
    for text in (
        f"gradscale {__version__}",
        platform.python_version(),
        "gradscale.numpy loads",
        "Devices: CPU",
        "there 2.0",
        'incomplete, without no; pip install "gradscale[demo]"',
    ):
        assert text in shown.output


def test_json_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    found = json.loads(doctor(monkeypatch, "--json", core=[HERE]).stdout)
    package = {"name": "there", "needs": ">=1", "version": "2.0", "supported": True, "shared": False}
    assert found["extras"] == [
        {"extra": "core", "packages": [package], "status": "gradscale.numpy loads", "broken": False}
    ]
    assert [trainer["status"] for trainer in found["trainers"]] == ["not installed"] * 6
    assert (found["gradscale"], found["python"]) == (__version__, platform.python_version())
    assert found["devices"] == ["CPU"]


def test_a_version_that_is_not_supported_makes_it_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = doctor(monkeypatch, torch=[OLD])
    assert shown.exit_code == 1
    assert 'not supported: old 2.5.1 is not >=2.6; pip install "gradscale[torch]"' in shown.output


def test_an_adapter_that_is_broken_makes_it_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR.importlib, "import_module", raising(OSError("libcudart.so.12 [missing]")))
    shown = doctor(monkeypatch, core=[HERE])
    assert shown.exit_code == 1
    assert "fails to load: OSError: libcudart.so.12 [missing]" in shown.output


def test_an_extra_that_is_not_installed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Package("numpy", "<1.24", "2.0", False, shared=True)
    shown = doctor(monkeypatch, mxnet=[ABSENT, shared])
    assert shown.exit_code == 0
    assert 'not installed; pip install "gradscale[mxnet]"' in shown.output


def test_an_adapter_without_a_package_that_no_extra_installs_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR.importlib, "import_module", raising(DOCTOR.MissingExtra("Keras needs a backend")))
    assert examine("keras", [HERE], "gradscale.keras") == Finding("keras", [HERE], "incomplete: Keras needs a backend")


def test_it_runs_where_gradscale_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR, "ADAPTERS", {CORE: "gradscale.numpy"})
    shown = doctor(monkeypatch)
    assert (shown.exit_code, "gradscale.numpy loads" in shown.output) == (0, True)


def test_every_trainer_is_shown_and_one_that_is_not_installed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = doctor(monkeypatch, core=[HERE])
    assert shown.exit_code == 0
    for line in (r"lightning +-", r"trl +- +>=1\.0", r"ray +- +>=2\.60", r"deepspeed +- +>=0\.19"):
        assert re.search(rf"^ {line} +not installed *$", shown.output, re.MULTILINE), shown.output


def test_a_trainer_has_the_versions_of_its_extra_and_is_no_row_of_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR.importlib, "import_module", lambda name: None)
    lightning = Package("lightning", ">=2.4", "2.6.6", True)
    shown = doctor(monkeypatch, lightning=[replace(HERE, name="torch", shared=True), lightning])
    assert shown.exit_code == 0
    assert re.search(
        r"^ lightning +2\.6\.6 +>=2\.4 +gradscale\.integrations\.lightning loads", shown.output, re.MULTILINE
    )
    assert "torch" not in shown.output


def test_a_trainer_whose_integration_does_not_load_makes_it_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR.importlib, "import_module", raising(ImportError("cannot import name 'Trainer'")))
    shown = doctor(monkeypatch, transformers=[Package("transformers", ">=5.0", "5.22.2", True)])
    assert shown.exit_code == 1
    assert "fails to load: ImportError: cannot import name 'Trainer'" in shown.output


def test_a_trainer_older_than_its_extra_asks_for_makes_it_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = doctor(monkeypatch, accelerate=[Package("accelerate", ">=1.0", "0.34", False)])
    assert shown.exit_code == 1
    assert "not supported: accelerate 0.34 is not >=1.0" in shown.output


def test_a_trainer_without_an_extra_of_another_version_is_not_tested_and_no_failure() -> None:
    ray = Package("ray", ">=2.60", "2.9.0", False)
    assert examine_trainer(ray) == Finding("ray", [ray], "not tested: ray 2.9.0 is not >=2.60")


def test_of_deepspeed_it_says_that_the_scaler_is_its_own() -> None:
    package = Package("deepspeed", ">=0.19", "0.19.8", True)
    assert examine_trainer(package).status == 'its engine has its own scaler: preset("deepspeed")'


def test_the_versions_of_trainers_without_an_extra_are_those_of_the_tests() -> None:
    groups = PYPROJECT["dependency-groups"]
    required = [Requirement(line) for name in ("trainers", "ray", "deepspeed") for line in groups[name]]
    assert {one.name: str(one.specifier) for one in required} == {
        name: trainer.tested for name, trainer in TRAINERS.items() if trainer.tested
    }


def test_the_other_trainers_have_an_extra() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {name for name, trainer in TRAINERS.items() if not trainer.tested} <= extras.keys()


def test_packages_and_bounds_are_those_of_the_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = Message()
    for extra in ("both", "cli"):
        metadata["Provides-Extra"] = extra
    for line in (
        "numpy>=1.0",
        "no-such-package>=3; extra == 'both'",
        "gradscale[cli]; extra == 'both'",
        "rich>=1000; extra == 'cli'",
        "numpy<1.0; extra == 'cli'",
        "windows-only; extra == 'cli' and python_version < '3'",
    ):
        metadata["Requires-Dist"] = line
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    versions = {"numpy": "1.5.0a0+git", "rich": "13.0"}
    monkeypatch.setattr(sys.modules["gradscale.cli._requirements"], "installed", versions.get)
    rich = Package("rich", ">=1000", "13.0", False)
    included = replace(rich, shared=True)
    numpy = Package("numpy", "<1.0", "1.5.0a0+git", False, shared=True)
    assert packages_by_extra() == {
        CORE: [Package("numpy", ">=1.0", "1.5.0a0+git", True, shared=True)],
        "both": [included, numpy, Package("no-such-package", ">=3", None, False)],
        "cli": [rich, numpy],
    }


def test_every_extra_of_this_installation_has_packages() -> None:
    found = packages_by_extra()
    if not found:
        pytest.skip("gradscale can be imported here but is not installed")
    assert {"torch", "jax", "keras", "mxnet", "demo"} <= found.keys()
    assert all(found.values())


def test_what_is_not_installed_has_no_version() -> None:
    assert installed("nothing-of-the-kind") is None
    assert installed("numpy")


def test_devices_of_a_loaded_framework_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(device_count=lambda: 1, get_device_name=lambda index: f"Card {index}")
    mps = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, backends=SimpleNamespace(mps=mps)))
    cpu, gpu = (SimpleNamespace(platform=name, device_kind=f"a {name}") for name in ("cpu", "gpu"))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(devices=lambda: [cpu, gpu]))
    found = devices()
    assert found[:3] == ["CPU", "Card 0 (torch cuda:0)", "Apple GPU (torch mps)"]
    assert len(found) == 4
    assert found[3].startswith("a gpu (jax ")


def test_a_driver_that_does_not_start_is_reported_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=raising(OSError("no"))))
    )
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert devices() == ["CPU", "torch fails to list its devices: no"]
