"""The report as a page: its parts, and names that are HTML."""

from pathlib import Path

import pytest
from tests.recording.made import peaks, record, trained
from tests.report.test_figures import HOSTILE, sampled

from gradscale import Dynamic, Headroom, Static, Status
from gradscale.recording.form import Step
from gradscale.recording.reader import read_run
from gradscale.report.page import parted, report, what_if


@pytest.fixture(autouse=True)
def plotly() -> None:
    pytest.importorskip("plotly")


def test_the_parts_come_in_order_and_no_name_is_html(tmp_path: Path) -> None:
    run = sampled(tmp_path)
    text = report([run, run])
    parts = ("scale is still being found", "Scale, loss and skips", "Layers and exponents", "Lost by layer")
    order = [text.index(part) for part in (*parts, "What other policies would have done", "Where the runs part")]
    assert order == sorted(order)
    assert HOSTILE not in text
    assert "<img onerror" not in text


def test_a_name_cannot_end_the_script(tmp_path: Path) -> None:
    path = record(tmp_path, Step(step=0, scale=1.0, status=Status.APPLIED), name="<script>x.jsonl")
    text = report([read_run(path)])
    assert "<script>x.jsonl" not in text
    assert "&lt;script&gt;x.jsonl" in text


def test_the_table_of_policies_has_that_of_the_run_first_and_says_what_cannot_be_told(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=16.0, status=Status.APPLIED)))
    table = what_if(run, ["auto", "static:65536"])
    shown = ["Dynamic() (this run)", "Headroom reads <code>amax</code>", "static:65536"]
    assert sorted(map(table.index, shown)) == list(map(table.index, shown))


def test_two_runs_part_where_scale_status_or_loss_first_differ(tmp_path: Path) -> None:
    def note(number: int) -> dict[str, float]:
        return {"loss": 1.0}

    amax = peaks(100)
    one = read_run(trained(tmp_path, Dynamic(init_scale=16.0, growth_interval=40), amax, note=note))
    same = read_run(trained(tmp_path, Static(16.0), amax[:40], note=note))
    other = read_run(trained(tmp_path, Headroom(), amax, note=lambda number: {"loss": 2.0 if number > 5 else 1.0}))
    assert parted(one, same) == "The runs have the same scale, status and loss in all of the 40 steps that both have."
    assert parted(one, other).startswith("They part at step 1: the scale is 16.0 and ")
    assert parted(one, other).endswith("loss at step 6.")
