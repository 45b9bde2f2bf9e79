"""What holds for the four recipes in every demo: checks for the tests of each framework."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gradscale.cli.demo import demo
from gradscale.demo import Run, compare, load_demo
from gradscale.histogram import best_static_scale, overflow_share

RECIPES = ("FP32", "FP16 unscaled", "FP16 static", "FP16 dynamic")

app = typer.Typer()
app.command()(demo)


def compared(framework: str, steps: int, seed: int = 0) -> list[Run]:
    """Returns the runs of a demo with one model."""
    demo = load_demo(framework)
    (comparison,) = compare(demo, dict.fromkeys(demo.steps, steps), seed, lambda model, recipe: None)
    return list(comparison.runs)


def check_same_start(runs: list[Run]) -> None:
    """Checks that every recipe starts from the same weights and batches."""
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
    """Runs one step by the command line, and checks that it shows the score and writes the plot."""
    plot = folder / "plot.png"
    shown: Any = CliRunner().invoke(app, ["--framework", framework, "--steps", "1", "--out", str(plot)])
    assert shown.exit_code == 0
    assert score in shown.output
    assert plot.stat().st_size > 1000
