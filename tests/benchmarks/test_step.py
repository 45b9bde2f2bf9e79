"""`python -m benchmarks.step`: what it measures and prints, and its errors."""

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks import step

QUICK = ("--parameters", "70k", "--tensors", "2", "--repeats", "2", "--device", "cpu", "--threads", "1")
SIDES = ["torch GradScaler", "LossScaler", "drop-in GradScaler", "no scaling"]

OWN = """
import torch

def model():
    return torch.nn.Linear(3, 2)

def optimizer(parameters):
    return torch.optim.RMSprop(parameters)

def broken():
    raise ValueError("a bug of the user's")
"""


class Shown(NamedTuple):
    """What the program printed, and its exit code."""

    exit_code: Any
    stdout: str
    stderr: str


def invoke(*arguments: str) -> Shown:
    code: Any = 0
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        try:
            step.main(arguments)
        except SystemExit as ended:
            code = ended.code
    return Shown(code, stdout.getvalue(), stderr.getvalue())


def measured(*arguments: str) -> Any:
    shown = invoke(*arguments, "--json")
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's, in the current folder."""
    (tmp_path / "users_bench.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "users_bench"
    sys.modules.pop("users_bench", None)


def test_a_table_for_each_clip_has_a_row_for_each_side() -> None:
    shown = invoke(*QUICK)
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert "parameters: 70,000, tensors: 2" in lines
    assert [line for line in lines if line.startswith("adamw")] == ["adamw fused, clip 1", "adamw fused, no clip"]
    for side in SIDES:
        assert sum(line.strip().startswith(f"{side} ") for line in lines) == 2
    assert max(map(len, lines)) <= 80


def test_the_table_shows_times_passes_and_syncs() -> None:
    rows = [line.split() for line in invoke(*QUICK, "--clip", "1").stdout.splitlines()]
    (torchs,) = [row for row in rows if row[:2] == ["torch", "GradScaler"]]
    assert torchs[3:] == ["1.00", "1.00-1.00", "4.0", "2.0", "0"]
    (ours,) = [row for row in rows if row[:1] == ["LossScaler"]]
    assert ours[4:] == ["2.0", "1.0", "0"]


def test_json_holds_what_was_measured_and_on_what() -> None:
    run = measured(*QUICK, "--policy", "static:8")
    assert {name: value for name, value in run.items() if name not in ("cases", "machine")} == {
        "policy": "static:8",
        "repeats": 2,
        "device": "cpu",
        "threads": 1,
        "torch": torch.__version__,
        "parameters": 70_000,
        "tensors": 2,
    }
    assert [case["case"] for case in run["cases"]] == ["adamw fused, clip 1", "adamw fused, no clip"]
    for case in run["cases"]:
        assert [side["side"] for side in case["sides"]] == SIDES
        assert all(side["median_ms"] > 0 and side["peak_allocated"] >= 0 for side in case["sides"])


@pytest.mark.parametrize(
    ("arguments", "clips"),
    [
        ([], [1.0, None]),
        (["--clip", "0.5"], [0.5]),
        (["--no-clip"], [None]),
    ],
)
def test_what_is_said_of_clipping_is_measured(arguments: list[str], clips: list[float | None]) -> None:
    assert [case["clip"] for case in measured(*QUICK, *arguments)["cases"]] == clips


@pytest.mark.parametrize(
    ("text", "parameters"), [("1000", 1000), ("2k", 2000), ("0.01M", 10_000), ("1m", 10**6), ("0.0001B", 100_000)]
)
def test_sizes_are_written_as_people_do(text: str, parameters: int) -> None:
    assert step._size(None, text, None) == (parameters, step.TENSORS)


def test_the_users_own_model_and_optimizer_are_measured(own: str) -> None:
    run = measured("--model", f"{own}:model", "--optimizer", f"{own}:optimizer", "--repeats", "2", "--no-clip")
    assert (run["parameters"], run["tensors"]) == (8, 2)
    assert run["cases"][0]["case"] == "users_bench:optimizer, no clip"


def test_threads_are_set_only_if_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    quick = [argument for argument in QUICK if argument != "--threads"][:-1]
    measured(*quick, "--no-clip")
    assert given == []
    measured(*quick, "--no-clip", "--threads", "3")
    assert given == [3]


def test_the_policy_is_that_of_the_loss_scaler() -> None:
    reads = [
        {side["side"]: side["passes_read"] for side in measured(*QUICK, "--no-clip", "-p", policy)["cases"][0]["sides"]}
        for policy in ("dynamic", "none")
    ]
    assert [read["LossScaler"] for read in reads] == [2.0, 1.0]
    assert reads[0]["drop-in GradScaler"] == reads[1]["drop-in GradScaler"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--clip", "0"],
            "`--clip` must be greater than 0. Received: 0.0. Without clipping: --no-clip.",
        ),
        (["--clip", "1", "--no-clip"], "`--clip` and `--no-clip` exclude each other. Received: both. Leave out one of"),
        (["--clip", "nan"], "`--clip` must be greater than 0. Received: nan."),
        (["--parameters", "many"], "`--parameters` must be a number, as in 300k, 25M or 1.5B. Received: 'many'."),
        (["--parameters", "-5"], "`--parameters` must be a number, as in 300k, 25M or 1.5B. Received: '-5'."),
        (["--parameters", ""], "`--parameters` must be a number, as in 300k, 25M or 1.5B. Received: ''."),
        (["--parameters", "3"], "`--tensors` must lie between 1 and the number of parameters"),
        (["--model", "a:b", "--parameters", "1M"], "`--model` has parameters and tensors of its own. Leave out"),
        (["--model", "a:b", "--tensors", "3"], "`--model` has parameters and tensors of its own. Leave out"),
        (["--model", "nothing_of_the_kind:make"], "`--model` must name a module that Python finds"),
        (["--model", ""], "`--model` must be MODULE:FUNCTION"),
        (["--optimizer", "adamx"], "`--optimizer` must be adamw, adam, sgd, adagrad or MODULE:FUNCTION"),
        (["--implementation", "slow"], "`--implementation` must be one of fused, foreach, for-loop. Received: 'slow'."),
        (["--implementation", ""], "`--implementation` must be one of fused, foreach, for-loop. Received: ''."),
        (["--repeats", "1"], "`--repeats` must be at least 2. Received: 1."),
        (["--device", "meta"], "`--device` must be one that torch can compute on here: cpu"),
        (["--policy", "nope"], "`--policy` 'nope'"),
    ],
)
def test_mistakes_are_reported_without_a_traceback_and_exit_with_2(arguments: list[str], text: str) -> None:
    shown = invoke(*arguments)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert f"python -m benchmarks.step: error: {text}" in shown.stderr


def test_a_bug_in_the_users_own_code_shows_its_traceback(own: str) -> None:
    with pytest.raises(ValueError, match="a bug of the user's"):
        invoke("--model", f"{own}:broken")
