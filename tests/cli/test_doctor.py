"""`gradscale doctor`: what it finds, and that it does not fail on what is broken."""

import platform
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gradscale import __version__
from gradscale.cli import app
from gradscale.cli.doctor import Finding, devices, examine, installed

DOCTOR = sys.modules["gradscale.cli.doctor"]


def doctor(monkeypatch: pytest.MonkeyPatch, **adapters: str) -> Result:
    monkeypatch.setattr(DOCTOR, "ADAPTERS", adapters)
    return CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "120"})


def raising(error: Exception) -> Any:
    def raise_it(*_: object) -> None:
        raise error

    return raise_it


def test_it_shows_versions_adapters_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = doctor(monkeypatch, numpy="gradscale.numpy")
    assert shown.exit_code == 0, shown.output
    for text in (
        f"gradscale {__version__}",
        platform.python_version(),
        "gradscale.numpy loads",
        "Devices: CPU",
        "rich",
    ):
        assert text in shown.output


def test_an_adapter_that_is_broken_makes_it_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR.importlib, "import_module", raising(OSError("libcudart.so.12 [missing]")))
    shown = doctor(monkeypatch, numpy="gradscale.numpy")
    assert shown.exit_code == 1
    assert "fails to load: OSError: libcudart.so.12 [missing]" in shown.output


def test_a_framework_that_is_not_installed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = doctor(monkeypatch, nothing_of_the_kind="gradscale.numpy")
    assert shown.exit_code == 0
    assert 'not installed; pip install "gradscale[nothing_of_the_kind]"' in shown.output


@pytest.mark.parametrize("adapter", ["gradscale.nothing", "gradscale.nothing.deeper"])
def test_an_adapter_that_does_not_exist_yet_is_no_failure(adapter: str) -> None:
    assert examine("numpy", adapter) == Finding("numpy", installed("numpy"), "not in this version of gradscale")


def test_an_adapter_that_loads_is_found_with_its_version() -> None:
    assert examine("numpy", "gradscale.numpy") == Finding("numpy", installed("numpy"), "gradscale.numpy loads")


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
