"""The same training in every precision: the loss and the scores of each."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from gradscale.demo.torch.task import Task
from gradscale.demo.torch.train import TASKS, Context, TorchTrainer, adam, initial_model, workers
from gradscale.formats import FP8_E4M3, FP8_E5M2
from gradscale.policies.headroom import Headroom
from gradscale.torch import O0, O1, O2, O3, LossScaler, Precision, ScaleStuck, emulate, prepare

LAST = 20
"""Steps at the end whose mean loss is the final one."""


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
    """The end of a run.

    Attributes:
        loss: mean loss of the last steps.
        scores: the scores on the test data, by name.
        skipped: number of steps that were skipped.
    """

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
    return Outcome(float(np.mean(losses[-LAST:])), scores, int(scaler.metrics()["skipped"]))


def compare_precisions(
    model: str, steps: int, seeds: Sequence[int], tick: Callable[[], None], recipes: Sequence[PrecisionRecipe] = RECIPES
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

        queued = {recipe.name: [queue(recipe, seed) for seed in seeds] for recipe in recipes}
        return {name: [future.result() for future in futures] for name, futures in queued.items()}
