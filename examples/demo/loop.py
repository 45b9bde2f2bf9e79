"""The training loop, the recipes, and their comparison: the same for every framework."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from examples.demo.runs import Comparison, Run, Step, Subject

from gradscale import FP8_E5M2, FP16, FP32, Dynamic, Format, Headroom, NoScaling, Static
from gradscale.histogram import best_static_scale

SAMPLE_EVERY = 10
"""Steps from one comparison with FP32's gradients to the next: each costs an FP32 pass."""

OTHER_SEEDS = (1, 2)
"""Added to the seed for more runs of FP32, which show by how much the seed alone changes the result."""

SEEDS = "FP32 other seeds"
"""The name of those runs."""


@dataclass(frozen=True)
class Recipe:
    """A precision and a policy to train with.

    Attributes:
        name: its name in the table and the plot.
        format: the format of the gradients.
        policy: a policy, or `"static"` for the best scale that the gradients of the FP32 run allow.
        record: the file that a run is recorded in, with `{model}` for the model; None for none. Read with torch.
    """

    name: str
    format: Format
    policy: Any
    record: str | None = None


RECIPES = (
    Recipe("FP32", FP32, NoScaling()),
    # A scale of 1, checked for overflow like the others, so that it differs from them by underflow alone.
    Recipe("FP16 unscaled", FP16, Static(1.0)),
    Recipe("FP16 Static", FP16, "static"),
    Recipe("FP16 Headroom", FP16, Headroom()),
    # It starts where apex, DeepSpeed and Megatron start, at which the gradients of the first steps overflow. The usual
    # 2,000 clean steps before the scale doubles are more than the demo has.
    Recipe("FP16 Dynamic", FP16, Dynamic(init_scale=2.0**32, growth_interval=50)),
)
"""What every framework can compare, by the names of the policies. FP32 comes first."""

FP8_RECIPES = (
    Recipe("FP8 unscaled", FP8_E5M2, Static(1.0)),
    Recipe("FP8 Headroom", FP8_E5M2, Headroom(format=FP8_E5M2)),
)
"""The recipes for frameworks where FP8 can be emulated."""


class Trainer(Protocol):
    """One training run in one framework: a model, its optimizer, its scaler and its batches.

    The same seed gives every recipe the same initial weights and the same batches.
    """

    def step(self, sample: bool) -> Step:
        """Trains on the next batch. With `sample`, the result has the gradients, and those of FP32."""
        ...

    def scores(self) -> dict[str, float]:
        """Returns the subject's scores on the test data, computed in FP32."""
        ...


R = TypeVar("R")


class Stopped(Exception):
    """Raised in a worker whose result is no longer needed."""


class Workers:
    """A pool of threads that an error, such as Ctrl-C, stops.

    Args:
        threads: how many; 0 computes in the caller's thread, as the work is submitted.
    """

    def __init__(self, threads: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads else None
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Returns when all work is done. After an error the work is stopped first."""
        if error is not None:
            self._stopped.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=error is not None)

    def submit(self, work: Callable[[], R]) -> "Future[R]":
        """Queues some work."""
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[R] = Future()
        done.set_result(work())
        return done

    def check(self) -> None:
        """Raises `Stopped` if the work is no longer needed. Long work calls this regularly."""
        if self._stopped.is_set():
            raise Stopped


@dataclass(frozen=True)
class Experiment:
    """A model of a framework's demo.

    Attributes:
        subject: what is trained.
        steps: how many steps it needs to learn.
        load: loads the data by a seed, and returns a function that makes a trainer for a recipe.
        seconds: how long all runs of it take on two CPU cores, roughly.
    """

    subject: Subject
    steps: int
    load: Callable[[int], Callable[[Recipe], Trainer]]
    seconds: float


@dataclass(frozen=True)
class Demo:
    """The demo of one framework: what it compares, in order; what it trains; and the workers that run the training."""

    recipes: Sequence[Recipe]
    experiments: Sequence[Experiment]
    workers: Callable[[], AbstractContextManager[Workers]] = Workers

    @property
    def steps(self) -> dict[str, int]:
        """How many steps each model needs, by its name."""
        return {experiment.subject.model: experiment.steps for experiment in self.experiments}

    def seconds(self, plan: Mapping[str, int]) -> float:
        """Returns how long `plan`, the steps of some models, takes on two CPU cores, roughly."""
        return sum(one.seconds * plan.get(one.subject.model, 0) / one.steps for one in self.experiments)

    def runs(self, plan: Mapping[str, int]) -> dict[tuple[str, str], int]:
        """Returns the steps that `compare` reports for each model and name of a run."""
        listed = {(model, recipe.name): steps for model, steps in plan.items() for recipe in self.recipes}
        return listed | {(model, SEEDS): steps * len(OTHER_SEEDS) for model, steps in plan.items()}


def train(recipe: Recipe, trainer: Trainer, steps: int, tick: Callable[[], None], *, sampled: bool = True) -> Run:
    """Returns a run of `steps` steps. `tick` is called after each. Gradients are compared with FP32's if `sampled`."""
    run = Run(recipe.name)
    for step in range(steps):
        run.add(trainer.step(sample=sampled and step % SAMPLE_EVERY == 0))
        tick()
    run.scores = trainer.scores()
    return run


def compare(demo: Demo, plan: Mapping[str, int], seed: int, tick: Callable[[str, str], None]) -> list[Comparison]:
    """Returns a comparison of all recipes for each model of `plan`, which has their numbers of steps.

    `seed` is that of the data's split, the initial weights and the batches. `tick` is called after each step with the
    names of the model and the run, from several threads.
    """
    reference, *others = demo.recipes
    with demo.workers() as workers:

        def submit(
            subject: Subject, make: Callable[[Recipe], Trainer], recipe: Recipe, sampled: bool = True
        ) -> Future[Run]:
            trainer = make(recipe)  # not in the worker: threads share torch's random numbers

            def checked_tick() -> None:
                workers.check()
                tick(subject.model, recipe.name)

            return workers.submit(lambda: train(recipe, trainer, plan[subject.model], checked_tick, sampled=sampled))

        experiments = [one for one in demo.experiments if one.subject.model in plan]
        chosen = [(one.subject, one.load(seed)) for one in experiments]
        untrained = [make(reference).scores() for _, make in chosen]
        # All references first: the static scale of a model is made from the gradients of its FP32 run.
        submitted = [[submit(*experiment, reference)] for experiment in chosen]
        for experiment, runs in zip(chosen, submitted, strict=True):
            for recipe in others:
                runs.append(submit(*experiment, _with_scale(recipe, runs[0])))
        again = replace(reference, name=SEEDS)
        reseeded = [
            [submit(one.subject, one.load(seed + more), again, sampled=False) for more in OTHER_SEEDS]
            for one in experiments
        ]
        return [
            Comparison(
                one.subject,
                [run.result() for run in runs],
                start,
                {seed + more: run.result().scores for more, run in zip(OTHER_SEEDS, seeds, strict=True)},
            )
            for one, runs, start, seeds in zip(experiments, submitted, untrained, reseeded, strict=True)
        ]


def _with_scale(recipe: Recipe, reference: Future[Run]) -> Recipe:
    """Returns the recipe; one with a static scale gets the best one for the gradients of the FP32 run."""
    if recipe.policy != "static":
        return recipe
    return replace(recipe, policy=Static(best_static_scale(reference.result().histogram, FP16)))
