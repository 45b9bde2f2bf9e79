"""`python -m examples.demo.precisions`: every precision is trained, with every seed, and shown."""

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch")

from examples.demo.precisions import Outcome, main, make_table


def printed(*arguments: str) -> str:
    with redirect_stdout(StringIO()) as stdout:
        main(arguments)
    return stdout.getvalue()


@pytest.fixture(scope="module")
def runs() -> Any:
    return json.loads(printed("--model", "cnn", "--seeds", "2", "--steps", "2", "--json"))["cnn"]


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
    shown = printed("--model", "cnn", "--seeds", "2", "--steps", "1")
    for name in ("FP32 (O0)", "O2, remainders", "O3", "FP8, emulated", "accuracy"):
        assert name in shown


def test_a_run_that_ends_in_nan_is_shown() -> None:
    clean, broken = Outcome(1.0, {"accuracy": 0.9}, 0), Outcome(float("nan"), {"accuracy": 0.1}, 9)
    console = Console(width=100, file=StringIO(), record=True)
    console.print(make_table("cnn", {"FP32 (O0)": [clean, clean], "O3": [broken, broken]}))
    assert "+nan ± nan" in console.export_text()


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "rnn"])
    assert "argument --model: invalid choice: 'rnn'" in capsys.readouterr().err
