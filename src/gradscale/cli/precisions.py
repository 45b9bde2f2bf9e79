"""`gradscale precisions`: the same training in every precision."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.progress import Progress

from gradscale._extras import require
from gradscale.cli._console import chosen_models, console, table, usage_errors
from gradscale.demo import load_demo
from gradscale.demo.extra import PACKAGES

if TYPE_CHECKING:
    from gradscale.demo.torch.precisions import Outcome

LEGEND = (
    "loss: mean of the last 20 steps and over the seeds. vs FP32: by how much it differs from FP32 with the same seed, "
    "mean and standard deviation. skipped: steps per run."
)


def precisions(
    model: Annotated[str, typer.Option(help="Which model to train: cnn, gpt or all.")] = "all",
    seeds: Annotated[int, typer.Option(min=2, help="How many seeds each precision is trained with.")] = 3,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each run, instead of what the model needs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every run as JSON.")] = False,
) -> None:
    """Train the demo's models in every precision, and compare loss and score.

    FP32, FP16 as O1, O2 with every kind of master weights, O3, BF16, and emulated FP8. Takes minutes.
    """
    with usage_errors():
        require("`gradscale precisions`", "torch", *PACKAGES, extra="torch,demo")
        from gradscale.demo.torch.precisions import RECIPES, compare_precisions

        known = load_demo("torch").steps
        chosen = chosen_models(model, known)
    found: dict[str, dict[str, list[Outcome]]] = {}
    with Progress(console=console(), disable=as_json) as progress:
        for name in chosen:
            bar = progress.add_task(name, total=len(RECIPES) * seeds)
            found[name] = compare_precisions(
                name, steps or known[name], range(seeds), lambda bar=bar: progress.advance(bar)
            )
    if as_json:
        print(json.dumps(found, default=asdict))
        return
    for name, recipes in found.items():
        _show(name, recipes)
    console().print(LEGEND)


def _show(name: str, recipes: "dict[str, list[Outcome]]") -> None:
    base = next(iter(recipes.values()))
    scores = list(base[0].scores)
    rows = table(name, "loss", "vs FP32", *scores, "skipped")
    for recipe, runs in recipes.items():
        losses = np.array([run.loss for run in runs])
        differences = losses - [run.loss for run in base]
        rows.add_row(
            recipe,
            f"{losses.mean():.4f}",
            "" if runs is base else f"{differences.mean():+.4f} ± {differences.std(ddof=1):.4f}",
            *(f"{np.mean([run.scores[score] for run in runs]):.3f}" for score in scores),
            f"{np.mean([run.skipped for run in runs]):.1f}",
        )
    console().print(rows)
