"""`gradscale precisions`: every precision is trained, with every seed, and shown."""

import json
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gradscale.cli import app

torch = pytest.importorskip("torch")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["precisions", *arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def runs() -> Any:
    shown = invoke("--model", "cnn", "--seeds", "2", "--steps", "2", "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.output)["cnn"]


def test_every_precision_is_trained_with_every_seed(runs: Any) -> None:
    assert [name.split(",")[0] for name in runs] == ["FP32 (O0)", "O1", "O2", "O2", "O2", "O2", "O3", "BF16", "FP8"]
    assert all(len(outcomes) == 2 for outcomes in runs.values())


def test_seeds_differ_and_precisions_start_from_the_same_weights(runs: Any) -> None:
    full, half = runs["FP32 (O0)"], runs["O1"]
    assert full[0]["loss"] != full[1]["loss"]
    for one, other in zip(full, half, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)
        assert one["loss"] != other["loss"]


def test_the_table_has_a_row_for_each() -> None:
    shown = invoke("--model", "cnn", "--seeds", "2", "--steps", "1")
    assert shown.exit_code == 0, shown.output
    for name in ("FP32 (O0)", "O2, remainders", "O3", "FP8, emulated", "accuracy"):
        assert name in shown.output


def test_a_run_that_ends_in_nan_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from gradscale.demo.torch.precisions import Outcome

    clean, broken = Outcome(1.0, {"accuracy": 0.9}, 0), Outcome(float("nan"), {"accuracy": 0.1}, 9)
    sys.modules["gradscale.cli.precisions"]._show("cnn", {"FP32 (O0)": [clean, clean], "O3": [broken, broken]})
    assert "+nan ± nan" in capsys.readouterr().out


def test_everything_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradscale._extras.installed", lambda name: name not in ("torch", "sklearn"))
    shown = invoke()
    assert shown.exit_code == 1
    assert shown.stderr == (
        "Error: `gradscale precisions` needs torch, sklearn, which are not installed. "
        'Run: pip install "gradscale[torch,demo]"\n'
    )


def test_an_unknown_model_is_refused() -> None:
    shown = invoke("--model", "rnn")
    assert shown.exit_code == 2
    assert "`--model` must be one of all, cnn, gpt. Received: 'rnn'." in shown.output
