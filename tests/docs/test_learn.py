"""The pages under Learn: their code prints what they show, and their figures are those of the recorded runs."""

import io
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs.data.draw_headroom import NANS, SPIKE, followed, gradients
from docs.data.recorded import load, recorded_histograms
from examples.demo.data import AUTOENCODER, LANGUAGE
from examples.demo.runs import Comparison, Run, Subject
from examples.demo.show import verdict

from gradscale import Headroom
from gradscale.histogram import EXPONENTS, best_static_scale, lost_share, overflow_share

ROOT = Path(__file__).parents[2]

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
"""A block of code, and what it prints, if the page shows it."""


def power(exponent: Any) -> str:
    """Returns a power of two as the pages write it."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


@pytest.mark.parametrize(("name", "least"), [("what_is_loss_scaling", 8), ("slider", 1)])
def test_the_code_of_a_page_prints_what_the_page_shows(name: str, least: int) -> None:
    blocks = BLOCK.findall((ROOT / f"docs/learn/{name}.md").read_text())
    assert len(blocks) >= least
    names: dict[str, Any] = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown


def test_the_picture_is_described_with_the_shares_of_the_recorded_histogram() -> None:
    histogram = recorded_histograms()["CNN of 13 layers: all layers, first step"]
    text = (ROOT / "docs/learn/what_is_loss_scaling.md").read_text()
    assert f"{lost_share(histogram):.0%} of the gradients are below the range" in text
    assert f"{overflow_share(histogram, scale=2.0**32):.0%} are above the range" in text
    assert best_static_scale(histogram) == 2.0**17


def test_the_pages_name_the_range_of_the_recorded_gradients_and_where_they_overflow() -> None:
    histogram = recorded_histograms()["CNN of 13 layers: all layers, first step"]
    lowest, end = EXPONENTS[np.flatnonzero(histogram.counts)[0]], histogram.highest + 1
    text = (ROOT / "docs/learn/what_is_loss_scaling.md").read_text()
    assert text.count(f"gradients of the CNN lie between {power(lowest)} and {power(end)}.") == 2
    # At 2^20 the highest bin ends at 2^16; 65520 and above, where FP16 overflows, is a 2000th part of it.
    overflows = next(k for k in range(33) if overflow_share(histogram, scale=2.0**k) * histogram.nonzero >= 1)
    assert f"From {power(overflows)} on the largest overflow" in (ROOT / "docs/learn/slider.md").read_text()


def test_every_extra_is_listed_with_what_it_installs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/learn/install.md").read_text(), re.MULTILINE))
    assert rows.keys() == extras.keys()
    for extra in ("cli", "demo", "onnx"):
        packages = [re.split(r"[>=<]", each)[0] for each in extras[extra]]
        named = [re.sub(r"gradscale\[(\w+)\]", r"the extra `\1`", package) for package in packages]
        assert [name for name in named if name not in rows[extra]] == []


def test_the_run_with_overflows_is_described_as_it_was_recorded() -> None:
    run = load("dynamic_run")
    assert run["skipped"][:4] == [0, 1, 2, 3]
    assert f"skips {len(run['skipped'])} of {len(run['scales'])} steps" in (
        ROOT / "docs/learn/what_is_loss_scaling.md"
    ).read_text().replace("\n", " ")
    assert run["policy"] in (ROOT / "docs/learn/what_is_loss_scaling.md").read_text()


def test_the_pictures_are_drawn_from_the_recorded_runs(tmp_path: Path) -> None:
    script = ROOT / "docs/data/draw.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, capture_output=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"loss_scaling.svg", "loss_scaling-dark.svg"} <= names
    assert names <= {path.name for path in (ROOT / "docs/images").iterdir()}


RESULT = re.compile(
    r"^  (\w+) +(accuracy|perplexity) .*\n ─+\n((?:  FP.*\n)+)\n\1: ((?:.+\n)+?)(?=\n|```)", re.MULTILINE
)
"""The demo's table and verdict: the model, its first score, the rows, and the text of the verdict."""

ROW = re.compile(r"^  (FP\d+ ?\w*) .* (\d+) +2\^\d+$", re.MULTILINE)
"""A row of that table: the run, and how many steps were skipped."""

SHOWN = RESULT.findall((ROOT / "docs/learn/demo.md").read_text())


def test_the_page_of_the_demo_shows_the_results_of_four_frameworks() -> None:
    assert [model for model, *_ in SHOWN] == ["cnn", "gpt", "gpt", "autoencoder", "autoencoder"]


@pytest.mark.parametrize(("model", "score", "rows", "text"), SHOWN, ids=[f"{n}-{s[0]}" for n, s in enumerate(SHOWN)])
def test_the_page_quotes_a_verdict_in_the_words_of_the_demo(model: str, score: str, rows: str, text: str) -> None:
    spec = {**AUTOENCODER.scores, **LANGUAGE.scores}[score]
    quoted = " ".join(text.split())

    def ending(name: str) -> float:
        # The figures are those of one machine: here a run only ends as the page says that it does.
        if "unscaled" in name:
            return 0.0
        return 2.0 if f"{name} ends at" in quoted else 1.0

    runs = [
        Run(name, scales=[2.0**32] * 99, lost=[0.5], skipped=[*range(int(skipped))], scores={score: ending(name)})
        for name, skipped in ROW.findall(rows)
    ]
    assert len(runs) == len(rows.splitlines())
    seeds = {1: {score: 1.1}, 2: {score: 0.9}}
    demo = verdict(Comparison(Subject(model, "", {score: spec}, ""), runs, {score: 0.0}, seeds))
    assert without_figures(quoted) == without_figures(demo)


def without_figures(text: str) -> str:
    """Returns a text with every number but those in names replaced."""
    return re.sub(r"\b\d+(\.\d+)?", "#", text)


def test_the_picture_of_headroom_is_described_as_its_script_draws_it(tmp_path: Path) -> None:
    script = ROOT / "docs/data/draw_headroom.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, capture_output=True)
    assert (tmp_path / "headroom.png").stat().st_size > 0
    run = followed(Headroom(), gradients())
    exponents = np.log2(run["scale"])
    assert run["skipped"].tolist() == [SPIKE, *NANS]
    after = NANS[-1] + 1
    shown = [0, 1, 2, SPIKE, SPIKE + 1, SPIKE + 500, NANS[0], NANS[0] + 1, after, after + 400, -1]
    assert exponents[shown].tolist() == [4, 15, 20, 23, 11, 15, 17, 5, 1, 15, 18]
    assert np.log2(run["ceiling"])[[SPIKE, *NANS]].round().tolist() == [11, 5, 1, 1]
    text = (ROOT / "docs/use/policies.md").read_text()
    assert "starts at 2⁴, is 2¹⁵ a step later and 2²⁰ after two. It follows top up to 2²³." in text
    assert "the ceiling, and with it the scale, is 2¹¹, 12 bits below the scale that failed." in text
    assert "It is 2¹⁵ after 500 steps and 2¹⁷ at step 5,000, when three NaN batches lower it to 2⁵" in text
    assert "and then to 2¹, more than 20 bits below top, from where it doubles at each clean step." in text
    assert "It is 2¹⁵ again 400 steps later, and 2¹⁸ at the end." in text
