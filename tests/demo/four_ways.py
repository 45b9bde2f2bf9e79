"""What holds for the four ways to train in every demo: checks for the tests of each framework."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gradscale.cli.demo import demo
from gradscale.demo import Run
from gradscale.histogram import best_static_scale, overflow_share

app = typer.Typer()
app.command()(demo)


def check_same_start(runs: list[Run]) -> None:
    """Checks that every way starts from the same weights and batches."""
    full, *halves = (run.losses[0] for run in runs)
    assert halves == [halves[0]] * 3
    assert full != halves[0]
    assert full == pytest.approx(halves[0], rel=1e-3)


def check_static_scale(runs: list[Run]) -> None:
    """Checks that the static scale comes from the gradients of the run in FP32."""
    full, _, static, _ = runs
    assert set(static.scales) == {best_static_scale(full.histogram)}
    assert overflow_share(full.histogram, scale=static.scales[0]) == 0.0


def check_command(framework: str, score: str, folder: Path) -> None:
    """Runs one step by the command line, and checks that it shows the score and writes the picture."""
    picture = folder / "picture.png"
    told: Any = CliRunner().invoke(app, ["--framework", framework, "--steps", "1", "--out", str(picture)])
    assert told.exit_code == 0
    assert score in told.output
    assert picture.stat().st_size > 1000
