"""Runs of other systems, read from samples of their logs and files."""

import sys
from pathlib import Path

import numpy as np
import pytest

from gradscale._extras import MissingExtra
from gradscale.recording.logs import read_any
from gradscale.recording.reader import Run
from gradscale.report.verdict import findings

DATA = Path(__file__).parents[1] / "data"
NAN = float("nan")


def read(name: str) -> Run:
    return read_any(DATA / "logs" / name)


def test_deepspeed_names_the_scale_of_each_skip_and_counts_its_steps() -> None:
    run = read("deepspeed.log")
    assert run.step.tolist() == [0, 1, 2, *range(10, 210, 10)]
    assert run.scale[:5].tolist() == [65536.0, 65536.0, 32768.0, 16384.0, 16384.0]
    assert run.skipped.tolist() == [True] * 3 + [False] * 20
    assert run.notes["lr"][3] == 1e-5
    assert [each.title for each in findings(run)] == [
        "ok: 198 updates in 201 steps",
        "normal start-up: 3 skips while the scale is found",
    ]
    assert run.lines[0].startswith("2: [2026-11-19 06:51:00,903] [INFO] [loss_scaler.py")


def test_deepspeed_that_cannot_lower_the_scale_is_stuck() -> None:
    [verdict] = findings(read("deepspeed_stuck.log"))
    assert (verdict.level, verdict.title) == ("fault", "stuck: no scale helps")
    assert len(verdict.rows) == 9


def test_megatron_has_loss_norm_and_the_scale_after_each_step() -> None:
    run = read("megatron.log")
    assert run.step.tolist() == list(range(1, 61))
    assert run.skipped.tolist() == [False] * 48 + [True] * 12
    assert run.scale[[0, 47, 48, 49, 59]].tolist() == [65536.0, 65536.0, 65536.0, 32768.0, 32.0]
    assert (run.norm[0], run.notes["lr"][0], run.loss[0]) == (1.2, 5e-4, 10.53335)
    verdict = findings(run)[0]
    assert verdict.title == "learning rate: the run diverged"
    assert "the loss rose from 5.67 to 22.9 by step 48" in verdict.text
    assert run.lines[verdict.rows[1]].startswith("48:  [2026") or "iteration       48/" in run.lines[verdict.rows[1]]


def test_fairseq_names_the_scale_after_a_skip_and_counts_updates() -> None:
    run = read("fairseq.log")
    assert run.step[:4].tolist() == [0, 1, 2, 103]
    assert run.step[-1] == 1204
    assert run.scale[[0, 1, 2, 3, -2, -1]].tolist() == [128.0, 64.0, 32.0, 16.0, 16.0, 8.0]
    assert (run.loss[3], run.norm[3], run.loss[-1], run.norm[-1]) == (8.8, 2.1, 6.72, 3.281)
    assert findings(run)[1].title == "normal start-up: 3 skips while the scale is found"


@pytest.mark.parametrize(
    ("line", "at", "after"),
    [
        ("[deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1", 1.0, 1.0),
        ("Overflow detected. Skipping step. Attempted loss scale: 32768.0, reducing to 16384.0", 32768.0, 16384.0),
        ("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 8192.0", 16384.0, 8192.0),
        ("| WARNING: overflow detected, setting loss scale to: 0.25", 0.5, 0.25),
    ],
)
def test_other_forms_of_a_skip_are_read(tmp_path: Path, line: str, at: float, after: float) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"{line}\n{{'loss': 2.0491, 'grad_norm': 'nan', 'learning_rate': 0.0002, 'epoch': 0.28}}\n")
    run = read_any(path)
    assert run.scale.tolist() == [at, after]
    assert run.status.tolist() == ["overflow", "overflow"]
    assert run.loss[1] == 2.0491


def test_transformers_and_lightning_have_loss_and_norm_at_some_steps() -> None:
    state, metrics = read("trainer_state.json"), read("metrics.csv")
    assert state.step.tolist() == [5, 10, 15, 20, 25, 30]
    assert (state.loss[0], state.norm[0], state.notes["lr"][0]) == (
        0.7701575279235839,
        0.8840808272361755,
        0.008666666666666668,
    )
    assert state.loss[-1] != NAN
    assert np.isnan(state.scale).all()
    assert metrics.step.tolist() == [4, 9, 14, 19, 24, 29]
    assert (metrics.loss[0], metrics.norm[0]) == (0.9057590961456299, 1.1145117282867432)


def test_event_files_of_tensorboard_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for step, loss in enumerate((1.5, NAN, 1.25)):
        values = [Summary.Value(tag="train/loss", simple_value=loss), Summary.Value(tag="grad_scale", simple_value=64)]
        writer.add_event(Event(step=step, summary=Summary(value=values)))
    writer.close()
    run = read_any(tmp_path)
    assert run.step.tolist() == [0, 1, 2]
    assert run.scale.tolist() == [64.0, 64.0, 64.0]
    assert run.status.tolist() == ["applied", "nonfinite_loss", "applied"]


def test_an_event_file_without_tensorboard_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("gradscale._extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="An event file needs tensorboard, which is not installed"):
        read_any(tmp_path)


def test_a_record_is_read_as_one() -> None:
    assert read_any(DATA / "runs" / "healthy.jsonl").parts


@pytest.mark.parametrize("name", ["notes.txt", "notes.json", "notes.csv"])
def test_a_file_without_a_step_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=rf"A run is read from a record.* Received: .*{name}, in which no step"):
        read_any(path)
