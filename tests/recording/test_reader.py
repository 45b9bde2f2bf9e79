"""Reading a record back: columns, torn and repeated lines, files that are none."""

from pathlib import Path

import numpy as np
import pytest
from tests.recording.made import header, record

from gradscale import Dynamic, Status
from gradscale.engine.culprits import Culprit
from gradscale.recording.form import Step
from gradscale.recording.reader import read_run

RUNS = Path(__file__).parents[1] / "data" / "runs"


def step(number: int, **more: object) -> Step:
    return Step(**{"step": number, "scale": 2.0**16, "status": Status.APPLIED, **more})  # type: ignore[arg-type]


def test_a_run_has_a_column_for_each_number_and_nan_where_it_is_not_known(tmp_path: Path) -> None:
    culprits = (Culprit("layer.weight", "inf", 3),)
    path = record(
        tmp_path,
        step(0, amax=0.5, norm=2.0, note={"loss": 1.5, "lr": 0.1}),
        step(1, status=Status.OVERFLOW, retries=2, culprits=culprits, amax=float("inf")),
        step(2, scale=2.0**15, note={"loss": 1.25}),
    )
    run = read_run(path)
    assert (len(run), run.name, run.format) == (3, str(path), "FP16")
    assert run.step.tolist() == [0, 1, 2]
    assert run.scale.tolist() == [2.0**16, 2.0**16, 2.0**15]
    assert run.applied.tolist() == [True, False, True]
    assert run.skipped.tolist() == [False, True, False]
    np.testing.assert_array_equal(run.amax, [0.5, np.inf, np.nan])
    np.testing.assert_array_equal(run.loss, [1.5, np.nan, 1.25])
    np.testing.assert_array_equal(run.notes["lr"], [0.1, np.nan, np.nan])
    assert (run.retries.tolist(), dict(run.culprits)) == ([0, 2, 0], {1: culprits})
    assert [(row, each.saved().policy) for row, each in run.parts] == [(0, Dynamic())]
    assert repr(run) == f"Run({str(path)!r}, steps=3, skipped=1)"


def test_a_torn_last_line_is_dropped_and_one_in_the_middle_is_not(tmp_path: Path) -> None:
    path = record(tmp_path, step(0), step(1))
    whole = path.read_bytes()
    for cut in range(whole.index(b'{"step":1'), len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read_run(path)) == (2 if cut == len(whole) - 1 else 1)
    path.write_bytes(whole[:-10] + b"\n" + step(2).line().encode())
    with pytest.raises(ValueError, match=r"run\.jsonl, line 3: A line of a record is JSON"):
        read_run(path)


def test_of_a_step_that_occurs_twice_the_last_is_taken(tmp_path: Path) -> None:
    path = record(tmp_path, step(0), step(1), step(1, norm=3.0))
    run = read_run(path)
    assert run.step.tolist() == [0, 1]
    assert run.norm[1] == 3.0
    assert [row for row, _ in run.parts] == [0]


def test_a_run_that_was_resumed_from_an_older_checkpoint_leaves_out_what_was_undone(tmp_path: Path) -> None:
    path = record(tmp_path, *map(step, range(5)))
    resumed = header(Dynamic(growth_interval=7), resumed=True)
    path.write_text(path.read_text() + resumed.line() + step(2, norm=9.0).line())
    run = read_run(path)
    assert run.step.tolist() == [0, 1, 2]
    assert run.norm[2] == 9.0
    assert [(row, each.saved().policy.growth_interval) for row, each in run.parts] == [(0, 2000), (2, 7)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with a header"),
        ("hello\n", "line 1: A line of a record is JSON"),
        (step(0).line(), "begins with a header"),
        ('{"gradscale":"9","schema":2,"policy":{},"state":{}}\n', "reads records of schema 1. Received: schema=2"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(path)


def test_a_notebook_shows_the_verdict_and_plots_the_run() -> None:
    pytest.importorskip("plotly")
    run = read_run(RUNS / "nan_batch.jsonl")
    assert "forward overflow: 1 batch with a non-finite loss" in run._repr_html_()
    names = [trace.name for trace in run.plot().data]
    assert "loss inf or NaN (1)" in names
