"""The report of a run in a real browser: offline, on a phone, in the dark, with 100,000 steps and hostile names."""

from pathlib import Path

import numpy as np
import pytest
from tests.docs.browser import Page
from tests.recording.made import trained
from tests.report.test_figures import sampled

from gradscale import Headroom
from gradscale.recording.reader import Run, read_run
from gradscale.report.page import report

pytestmark = pytest.mark.slow


def opened(page: Page, folder: Path, *runs: Run) -> None:
    """Opens the report of runs, and waits until it is drawn."""
    path = folder / "report.html"
    path.write_text(report(runs), encoding="utf-8")
    page.requested.clear()
    page.open(path)
    page.wait("document.body.dataset.drawn !== undefined")


@pytest.fixture(autouse=True)
def plotly() -> None:
    pytest.importorskip("plotly")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_report_opens_offline_at_any_width(page: Page, tmp_path: Path, width: int) -> None:
    page.resize(width, 900)
    opened(page, tmp_path, sampled(tmp_path))
    assert {url.partition(":")[0] for url in page.requested} <= {"file", "data", "blob"}
    assert page.run("document.querySelectorAll('.figure .main-svg').length") > 0
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_hostile_name_is_shown_and_not_run(page: Page, tmp_path: Path) -> None:
    page.run("window.alert = () => { document.body.dataset.attacked = 1 }")
    opened(page, tmp_path, sampled(tmp_path))
    assert page.run("document.querySelectorAll('img[onerror]').length") == 0
    assert page.run("document.body.dataset.attacked") is None
    assert page.run("[...document.querySelectorAll('text')].some(text => text.textContent.includes('src=x>'))")


def test_the_slider_moves_the_heat_map(page: Page, tmp_path: Path) -> None:
    run = sampled(tmp_path)
    both = {0: run.watch[1][:0] or run.watch[1], 1: run.watch[1]}
    opened(page, tmp_path, Run(**{**vars(run), "watch": both}))
    assert page.run("figures.figure1.steps.join()") == "0,1"
    page.run("Plotly.animate('figure1', ['0'], { mode: 'immediate', frame: { duration: 0 } })")
    page.wait("document.querySelector('#figure1 .slider-label').textContent.startsWith('step')")


def test_a_long_run_keeps_its_spike_and_few_points(page: Page, tmp_path: Path) -> None:
    amax = np.full(100_000, 2.0**-6)
    amax[77_777] = 3e4
    path = trained(tmp_path, Headroom(), amax.tolist())
    opened(page, tmp_path, read_run(path))
    assert page.run("figures.figure0.data[0].x.length") <= 3002
    assert page.run("figures.figure0.data[1].x.join()") == "77777"
