"""`python -m examples.demo.precisions`: trains the demo's CNN and GPT in every precision; compares loss and scores.

FP32, FP16 as O1, O2 with every kind of master weights, O3, BF16, and emulated FP8. Takes about a quarter of an hour.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from examples.demo.with_torch import DEMO, TASKS, Context, Task, TorchTrainer, adam, initial_model, workers
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from gradscale import FP8_E4M3, FP8_E5M2, Headroom
from gradscale.torch import O0, O1, O2, O3, LossScaler, Precision, ScaleStuck, emulate, prepare

LEGEND = (
    "loss: mean of the last 20 steps and over the seeds. vs FP32: by how much it differs from FP32 with the same seed, "
    "mean and standard deviation. skipped: steps per run."
)


@dataclass(frozen=True)
class PrecisionRecipe:
    """A precision to train in.

    Attributes:
        name: its name in the table.
        precision: how model and optimizer are prepared.
        context: the context that the model runs in.
        scaler: makes the scaler; None uses the precision's own.
        eps: Adam's. Its default is 0 in FP16.
    """

    name: str
    precision: Precision
    context: Context = nullcontext
    scaler: Callable[[nn.Module], LossScaler] | None = None
    eps: float = 1e-8


RECIPES = (
    PrecisionRecipe("FP32 (O0)", O0),
    PrecisionRecipe("O1", O1),
    PrecisionRecipe("O2, FP32 masters", O2),
    PrecisionRecipe("O2, remainders", replace(O2, master_weights="remainder")),
    PrecisionRecipe("O2, Kahan", replace(O2, master_weights="kahan")),
    PrecisionRecipe("O2, stochastic", replace(O2, master_weights="stochastic")),
    PrecisionRecipe("O3, eps=1e-4", O3, eps=1e-4),
    PrecisionRecipe("BF16", replace(O1, compute=torch.bfloat16)),
    PrecisionRecipe(
        "FP8, emulated",
        O0,
        context=lambda: emulate(FP8_E4M3, FP8_E5M2),
        scaler=lambda model: LossScaler(model, Headroom(format=FP8_E5M2)),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The end of a run: the mean loss of the last 20 steps, the scores on the test data, and the steps skipped."""

    loss: float
    scores: dict[str, float]
    skipped: int


def train_in(recipe: PrecisionRecipe, task: Task, model: nn.Module, seed: int, steps: int) -> Outcome:
    """Returns the outcome of training `model`. The same seed gives every precision the same batches.

    A run whose scale is stuck, because its weights are NaN, ends there; its loss is NaN.
    """
    model, optimizer, scaler = prepare(model, adam(task, model, recipe.eps), recipe.precision)
    if recipe.scaler is not None:
        scaler = recipe.scaler(model)
    generator = torch.Generator().manual_seed(seed)
    trainer = TorchTrainer(task, model, optimizer, scaler, recipe.context, generator, loss="trained")
    losses: list[float] = []
    with suppress(ScaleStuck):
        for _ in range(steps):
            losses.append(trainer.step(sample=False).loss)
    with recipe.context():
        scores = trainer.scores()
    return Outcome(float(np.mean(losses[-20:])), scores, int(scaler.metrics()["skipped"]))


def compare_precisions(
    model: str, steps: int, seeds: Sequence[int], tick: Callable[[], None]
) -> dict[str, list[Outcome]]:
    """Returns the outcomes by recipe, one for each seed of split, initial weights and batches.

    `tick` is called after each run.
    """
    tasks = {seed: TASKS[model](seed) for seed in seeds}
    with warnings.catch_warnings(), workers() as pool:
        warnings.filterwarnings("ignore", "These parameters are FP16")  # O3 is there to show what that costs

        def queue(recipe: PrecisionRecipe, seed: int) -> Future[Outcome]:
            # Made here, in the caller's thread: threads share torch's random numbers.
            start = initial_model(tasks[seed], seed)
            future = pool.submit(lambda: train_in(recipe, tasks[seed], start, seed, steps))
            future.add_done_callback(lambda _: tick())
            return future

        queued = {recipe.name: [queue(recipe, seed) for seed in seeds] for recipe in RECIPES}
        return {name: [future.result() for future in futures] for name, futures in queued.items()}


def make_table(model: str, outcomes: Mapping[str, Sequence[Outcome]]) -> Table:
    """Returns a table with a row for each precision; the first is what the others are compared with."""
    base = next(iter(outcomes.values()))
    scores = list(base[0].scores)
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column(model)
    for heading in ("loss", "vs FP32", *scores, "skipped"):
        made.add_column(heading, justify="right")
    for recipe, runs in outcomes.items():
        losses = np.array([run.loss for run in runs])
        differences = losses - [run.loss for run in base]
        made.add_row(
            recipe,
            f"{losses.mean():.4f}",
            "" if runs is base else f"{differences.mean():+.4f} ± {differences.std(ddof=1):.4f}",
            *(f"{np.mean([run.scores[score] for run in runs]):.3f}" for score in scores),
            f"{np.mean([run.skipped for run in runs]):.1f}",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and shows a table for each model."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.precisions", description=__doc__)
    parser.add_argument("--model", choices=["all", *DEMO.steps], default="all", help="which model to train")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds each precision is trained with, from 2")
    parser.add_argument("--steps", type=int, help="of each run, instead of what the model needs")
    parser.add_argument("--json", action="store_true", help="print every run as JSON")
    options = parser.parse_args(arguments)
    screen, found = Console(highlight=False), dict[str, dict[str, list[Outcome]]]()
    with Progress(console=screen, disable=options.json) as progress:
        for name in DEMO.steps if options.model == "all" else [options.model]:
            bar = progress.add_task(name, total=len(RECIPES) * options.seeds)
            steps = options.steps or DEMO.steps[name]
            found[name] = compare_precisions(name, steps, range(options.seeds), lambda bar=bar: progress.advance(bar))
    if options.json:
        print(json.dumps(found, default=asdict))
        return
    for name, outcomes in found.items():
        screen.print(make_table(name, outcomes))
    screen.print(LEGEND)


if __name__ == "__main__":
    main()
