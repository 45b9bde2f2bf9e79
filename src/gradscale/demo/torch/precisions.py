"""The same training in every precision: what each costs in loss and in score."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gradscale.demo.torch.compare import TASKS
from gradscale.demo.torch.task import Task
from gradscale.demo.torch.workers import Workers
from gradscale.formats import FP8_E4M3, FP8_E5M2
from gradscale.policies.headroom import Headroom
from gradscale.torch import O0, O1, O2, O3, LossScaler, Precision, ScaleStuck, emulate, prepare

LAST = 20
"""Steps at the end whose mean loss is the final one."""

Prepared = tuple[nn.Module, torch.optim.Optimizer, LossScaler]


@dataclass(frozen=True)
class Recipe:
    """A precision to train in.

    Attributes:
        name: what the table calls it.
        precision: how model and optimizer are prepared.
        context: what training runs inside of.
        scaler: the scaler, if not the one that the precision brings.
    """

    name: str
    precision: Precision
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: Callable[[nn.Module], LossScaler] | None = None

    def prepared(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
        """Returns model, optimizer and scaler, ready to train."""
        model, optimizer, scaler = prepare(model, optimizer, self.precision)
        return model, optimizer, scaler if self.scaler is None else self.scaler(model)


RECIPES = (
    Recipe("FP32 (O0)", O0),
    Recipe("O1", O1),
    Recipe("O2, FP32 masters", O2),
    Recipe("O2, remainders", replace(O2, master_weights="remainder")),
    Recipe("O2, Kahan", replace(O2, master_weights="kahan")),
    Recipe("O2, stochastic", replace(O2, master_weights="stochastic")),
    Recipe("O3", O3),
    Recipe("BF16", replace(O1, compute=torch.bfloat16)),
    Recipe(
        "FP8, emulated",
        O0,
        context=lambda: emulate(FP8_E4M3, FP8_E5M2),
        scaler=lambda model: LossScaler(model, Headroom(format=FP8_E5M2)),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        loss: mean loss of the last steps.
        scores: what was measured on test data, by name.
        skipped: steps that were skipped.
    """

    loss: float
    scores: dict[str, float]
    skipped: int


def train_in(recipe: Recipe, task: Task, model: nn.Module, seed: int, steps: int) -> Outcome:
    """Returns what became of training `model`. The same seed gives every precision the same batches.

    A run that gets stuck, because its weights are NaN, ends there and has no loss.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.learning_rate, fused=True)
    model, optimizer, scaler = recipe.prepared(model, optimizer)
    losses: list[float] = []
    with recipe.context(), suppress(ScaleStuck):
        for _ in range(steps):
            loss = task.losses(model, task.batch(generator)).trained
            losses.append(float(loss.detach()))
            scaler.backward(loss)
            scaler.step(optimizer)
            optimizer.zero_grad()
    with recipe.context():
        scores = task.scores(model)
    return Outcome(float(np.mean(losses[-LAST:])), scores, int(scaler.metrics()["skipped"]))


def compare_precisions(
    model: str, steps: int, seeds: Sequence[int], tick: Callable[[], None], recipes: Sequence[Recipe] = RECIPES
) -> dict[str, list[Outcome]]:
    """Returns the outcomes by recipe, one for each seed.

    Args:
        model: short name of what is trained.
        steps: how long each run is.
        seeds: of the split, the start and the batches: every recipe gets all of them.
        tick: called after each run.
        recipes: the precisions.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks = {seed: TASKS[model](seed, device) for seed in seeds}
    with warnings.catch_warnings(), Workers(device) as workers:
        warnings.filterwarnings("ignore", "These parameters are FP16")  # which is what O3 is to show

        def queue(recipe: Recipe, seed: int) -> "Future[Outcome]":
            start = _start(tasks[seed], seed)
            future = workers.submit(lambda: train_in(recipe, tasks[seed], start, seed, steps))
            future.add_done_callback(lambda _: tick())
            return future

        queued = {recipe.name: [queue(recipe, seed) for seed in seeds] for recipe in recipes}
        return {name: [future.result() for future in futures] for name, futures in queued.items()}


def _start(task: Task, seed: int) -> nn.Module:
    """Returns the model that a seed gives. To be made in one thread: threads share torch's random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return task.model()
