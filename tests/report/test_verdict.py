"""What a run is said to show: the verdict, and what happened on the way."""

from pathlib import Path

import numpy as np
import pytest
from tests.recording.made import peaks, record, trained

from gradscale import Dynamic, Static, Status
from gradscale.recording.form import Step
from gradscale.recording.reader import read_run
from gradscale.report.verdict import findings, numbers

RUNS = Path(__file__).parents[1] / "data" / "runs"


@pytest.mark.parametrize(
    ("name", "level", "title", "text"),
    [
        ("healthy", "fine", "ok: 300 updates in 300 steps", "Nothing to do."),
        (
            "nan_batch",
            "event",
            "forward overflow: 1 batch with a non-finite loss",
            "At step 120 the loss was inf or NaN",
        ),
        ("learning_rate", "fault", "learning rate: the run diverged", r"The learning rate \(0.3\) is too high"),
    ],
)
def test_the_verdict_on_a_real_run_is_right(name: str, level: str, title: str, text: str) -> None:
    verdict = findings(read_run(RUNS / f"{name}.jsonl"))[0]
    assert (verdict.level, verdict.title) == (level, title)
    assert verdict.text.startswith(text.replace("\\", ""))


def test_skips_at_the_start_are_normal_and_later_ones_are_counted(tmp_path: Path) -> None:
    run = read_run(trained(tmp_path, Dynamic(init_scale=2.0**24, growth_interval=50), peaks(600)))
    first, start, later = findings(run)
    assert first.title.startswith("ok: ")
    early = np.flatnonzero(run.skipped & (np.cumsum(run.applied) < 20)).tolist()
    assert start.title == f"normal start-up: {len(early)} skips while the scale is found"
    assert start.rows == tuple(early)
    count = int(run.skipped.sum()) - len(early)
    assert later.title == f"{count} overflow{'s' * (count > 1)} after the start, {count / 600:.2%} of all steps"
    assert {each.level for each in (first, start, later)} == {"fine"}


def test_a_loss_that_stays_non_finite_at_its_level_is_no_matter_of_the_learning_rate(tmp_path: Path) -> None:
    def note(number: int) -> dict[str, float]:
        return {"loss": 2.0 + np.sin(number) / 10 if number < 80 else float("nan"), "lr": 0.1}

    path = trained(tmp_path, Dynamic(), [0.1] * 100, bad_losses=range(80, 100), note=note)
    verdict = findings(read_run(path))[0]
    assert (verdict.level, verdict.title) == ("fault", "nonfinite loss: no scale helps")
    assert verdict.rows == tuple(range(80, 100))
    assert "look at the forward pass and the input batch" in verdict.text


def test_a_loss_that_had_risen_before_is(tmp_path: Path) -> None:
    def note(number: int) -> dict[str, float]:
        return {"loss": 2.0 if number < 50 else 2.0 + (number - 50) / 10, "lr": 0.1}

    path = trained(tmp_path, Dynamic(), [0.1] * 100, bad_losses=range(80, 100), note=note)
    verdict = findings(read_run(path))[0]
    assert verdict.title == "learning rate: the run diverged"
    assert "the loss rose from 2 to 4.45 by step 79, and no step after 79 was applied" in verdict.text
    assert "restart from a checkpoint before step 52" in verdict.text


def test_a_run_that_overflows_at_the_lowest_scale_is_stuck(tmp_path: Path) -> None:
    run = read_run(trained(tmp_path, Dynamic(init_scale=8.0), [float("inf")] * 40))
    verdict = findings(run)[0]
    assert (verdict.level, verdict.title) == ("fault", "stuck: no scale helps")


def test_gradients_far_below_what_fits_underflow(tmp_path: Path) -> None:
    verdict = findings(read_run(trained(tmp_path, Static(1.0), [1e-6] * 50)))[0]
    assert (verdict.level, verdict.title) == ("fault", "underflowing")


def test_a_record_without_a_step_says_so(tmp_path: Path) -> None:
    assert [each.title for each in findings(read_run(record(tmp_path)))] == ["no steps"]


def test_the_numbers_of_a_run_name_its_policy_and_its_scales(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=65536.0, status=Status.APPLIED)))
    assert numbers(run) == {
        "steps": "1",
        "skipped": "0 (0.00%)",
        "scale": "65536.0 to 65536.0",
        "policy": "Dynamic()",
        "format": "FP16",
        "made by": "gradscale 0.1.0,  ",
    }


def test_skips_at_the_start_are_no_thrashing_and_many_later_ones_are(tmp_path: Path) -> None:
    start = read_run(trained(tmp_path, Dynamic(init_scale=2.0**32), [0.5] * 100))
    assert start.skipped.sum() == 16
    assert findings(start)[0].title == "ok: 84 updates in 100 steps"
    later = read_run(trained(tmp_path, Dynamic(init_scale=2.0**16, growth_interval=10), [0.9] * 100))
    assert findings(later)[0].title == "thrashing"


def test_a_run_with_a_policy_of_the_users_own_is_shown_too(tmp_path: Path) -> None:
    path = trained(tmp_path, Dynamic(), [0.1] * 50)
    path.write_text(path.read_text().replace('"kind":"Dynamic"', '"kind":"Mine"'))
    run = read_run(path)
    assert findings(run)[0].title == "ok: 50 updates in 50 steps"
    assert numbers(run)["policy"] == "Mine"
