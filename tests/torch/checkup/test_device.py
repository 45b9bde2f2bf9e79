"""`gradscale doctor --device`: a self-test that passes here, and that can fail."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gradscale.checkup import device as checkup
from gradscale.checkup.device import DeviceFinding, check_device
from gradscale.cli import app

ON_CPU = pytest.mark.cpu_only("it names the CPU itself")


def results(device: str = "cpu") -> dict[str, DeviceFinding]:
    return {each.name: each for each in check_device(device)}


def test_every_test_passes_on_this_device(device: torch.device) -> None:
    found = results(str(device))
    assert [each for each in found.values() if each.passed is False] == []
    assert len(found) > 8


def test_host_reads_are_counted_where_there_is_a_device(device: torch.device) -> None:
    found = results(str(device))["host reads of a step"]
    expected = (
        (None, "a CPU is the host") if device.type == "cpu" else (True, "0 with a fused optimizer, 1 with another")
    )
    assert (found.passed, found.detail) == expected


@ON_CPU
def test_the_command_prints_a_row_for_each_test() -> None:
    found = CliRunner().invoke(app, ["doctor", "--device", "cpu"], env={"COLUMNS": "120"})
    assert found.exit_code == 0
    assert torch.__version__ in found.output
    assert all(name in found.output for name in results())
    listed = json.loads(CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json"]).stdout)
    assert [each["name"] for each in listed["tests"]] == list(results())


@ON_CPU
def test_a_device_that_is_not_there_is_one_line() -> None:
    found = CliRunner().invoke(app, ["doctor", "--device", "toaster"])
    assert found.exit_code == 2
    assert found.output.startswith("Error: `--device` must be one")


@ON_CPU
def test_a_cast_that_rounds_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkup.ROUNDED, 2049.0, 2050.0)
    found = results()["FP16 rounding"]
    assert (found.passed, found.detail) == (False, "2049 became 2048")


@ON_CPU
def test_an_inf_that_is_not_found_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.__setitem__

    def lost(tensor: Tensor, key: Any, value: Any) -> None:
        real(tensor, key, 1.0)

    monkeypatch.setattr(torch.Tensor, "__setitem__", lost)
    assert results()["inf and NaN are found"].passed is False


@ON_CPU
def test_a_fused_optimizer_that_differs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(parameters: Any, lr: float, **kind: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=2 * lr if kind.get("fused") else lr)

    monkeypatch.setitem(checkup.FUSED, "SGD", wrong)
    assert results()["fused SGD"].passed is False


@ON_CPU
def test_a_test_that_raises_has_failed_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(count: int, device: str, seed: int = 0) -> Tensor:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(checkup, "_numbers", broken)
    found = results()["FP16 products"]
    assert (found.passed, found.detail) == (False, "NotImplementedError: no kernel")


@ON_CPU
def test_an_optimizer_that_torch_does_not_have_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_plain(parameters: Any, lr: float, **kind: bool) -> torch.optim.Optimizer:
        if kind.get("fused"):
            raise RuntimeError("`fused=True` requires another device")
        return torch.optim.SGD(parameters, lr=lr)

    monkeypatch.setitem(checkup.FUSED, "SGD", only_plain)
    found = results()["fused SGD"]
    assert found.passed is None
    assert "requires another device" in found.detail
