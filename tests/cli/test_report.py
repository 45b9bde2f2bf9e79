"""`gradscale report`, `tune`, `explain-log`, and `replay` of a record."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gradscale.cli import app

DATA = Path(__file__).parents[1] / "data"
HEALTHY = str(DATA / "runs" / "healthy.jsonl")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})


def as_json(*arguments: str) -> Any:
    shown = invoke(*arguments, "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def test_report_writes_a_file_and_prints_the_verdicts(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    out = tmp_path / "out.html"
    shown = invoke("report", HEALTHY, str(DATA / "logs" / "megatron.log"), "-o", str(out))
    assert shown.exit_code == 0, shown.output
    assert "healthy.jsonl: ok: 300 updates in 300 steps. Nothing to do." in " ".join(shown.stdout.split())
    assert "megatron.log: learning rate: the run diverged." in " ".join(shown.stdout.split())
    assert out.read_text().startswith("<!doctype html>")
    found = as_json("report", HEALTHY, "-o", str(out))
    assert found["findings"][HEALTHY][0]["title"] == "ok: 300 updates in 300 steps"


def test_explain_log_shows_the_lines_behind_each_finding() -> None:
    shown = invoke("explain-log", str(DATA / "logs" / "deepspeed.log"))
    assert shown.exit_code == 0, shown.output
    assert "normal start-up: 3 skips while the scale is found" in shown.stdout
    assert "  2: [2026-11-19 06:51:00,903]" in shown.stdout
    stuck = invoke("explain-log", str(DATA / "logs" / "deepspeed_stuck.log")).stdout
    assert "stuck: no scale helps" in stuck
    assert "  and 6 more" in stuck
    assert as_json("explain-log", str(DATA / "logs" / "megatron.log"))[0]["rows"][1] == 47


def test_replay_of_a_record_compares_policies_and_has_that_of_the_run_first() -> None:
    arguments = ("replay", HEALTHY, "--policy", "auto", "dynamic:growth_interval=200", "deepspeed")
    shown = invoke(*arguments)
    assert shown.exit_code == 0, shown.output
    rows = [line.split("  ")[0].strip() for line in shown.stdout.splitlines() if line.startswith(" ")]
    named = ["Headroom() (this run)", "auto", "dynamic:growth_interval=200", "deepspeed"]
    assert [row for row in rows if row in named] == named
    found = as_json(*arguments)
    assert found[0]["scales"] == found[1]["scales"]
    assert (len(found[2]["scales"]), found[1]["stuck"]) == (300, False)


def test_tune_ends_with_a_line_to_paste() -> None:
    shown = invoke("tune", HEALTHY, "--candidates", "30")
    assert shown.exit_code == 0, shown.output
    best = as_json("tune", HEALTHY, "--candidates", "30")["best"]
    assert shown.stdout.splitlines()[-1] == f"scaler = LossScaler(model, policy={best['policy']})"


@pytest.mark.parametrize("command", ["report", "tune", "explain-log"])
def test_a_file_that_holds_no_run_is_an_error_in_one_line(command: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    shown = invoke(command, str(path))
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
    assert shown.stderr.startswith("Error: A run is read from a record")
    assert invoke(command, str(tmp_path / "none")).exit_code == 2
