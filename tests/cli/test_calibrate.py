"""`gradscale calibrate`: what it prints and draws, and its errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradscale.cli import app

pytest.importorskip("torch")

FACTORY = """
import torch
from torch import nn

def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, [torch.ones(2, 3)] * 5, lambda model, batch: model(batch).square().mean()

def trained():
    model, batches, loss_fn = parts()
    return model, batches, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1)

def only_a_model():
    return parts()[0]

def batches_that_are_none():
    model, _, loss_fn = parts()
    return model, 5, loss_fn

def optimizer_that_is_none():
    return *parts(), 0.1

def fail(*_):
    raise ValueError("in the user's function")

def a_loss_that_fails():
    return *parts()[:2], fail

def batches_that_fail():
    model, _, loss_fn = parts()
    return model, map(fail, range(3)), loss_fn
"""


@pytest.fixture(autouse=True)
def _factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", *arguments], env={"COLUMNS": "80"})


def test_scales_and_gradients_are_shown() -> None:
    shown = invoke("own_parts:parts", "--layers", "2")
    assert shown.exit_code == 0, shown.output
    in_order = [shown.stdout.index(text) for text in ("No scale is needed", "FP16: best static scale", "2^0")]
    assert in_order == sorted(in_order)
    assert "5/5" in shown.stdout
    assert "best" in shown.stdout
    assert "gradients not shown" in shown.stdout


def test_bf16_is_said_to_need_no_scale() -> None:
    shown = invoke("own_parts:parts", "--format", "bf16")
    assert "BF16: best static scale 1," in shown.stdout
    assert "it needs no loss scaling" in shown.stdout
    assert "2^-" not in shown.stdout.partition("gradient of")[0]


@pytest.mark.parametrize("name", ["parts", "trained"])
def test_json_has_every_gradient(name: str) -> None:
    shown = invoke(f"own_parts:{name}", "--batches", "2", "--format", "e5m2", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["format"] == "FP8_E5M2"
    assert {"0.weight", "0 (output)"} <= {layer["name"] for layer in found["layers"]}


def test_the_losses_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = invoke("own_parts:parts", "--plot", str(tmp_path / "scales.png"))
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("own_parts:only_a_model",), "must return (model, batches, loss_fn) or (model, batches, loss_fn, optimizer)"),
        (("own_parts:batches_that_are_none",), "Received: Sequential, int, function from own_parts"),
        (("own_parts:optimizer_that_is_none",), "Received: Sequential, list, function, float from own_parts"),
        (("own_parts",), "must be MODULE:FUNCTION"),
        (("../own_parts:parts",), "must be MODULE:FUNCTION"),
        (("own_parts:parts", "--format", "fp17"), "no format of that name"),
        (("own_parts:parts", "--plot", "scales.txt"), "ends in .png or .svg"),
        (("own_parts:parts", "--plot", "nowhere/scales.png"), "in a folder that exists"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    shown = invoke(*arguments)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["fail", "a_loss_that_fails", "batches_that_fail"])
def test_an_error_of_the_users_function_keeps_its_traceback(name: str) -> None:
    error = invoke(f"own_parts:{name}").exception
    assert isinstance(error, ValueError)
    assert str(error) == "in the user's function"
