"""The training loop, the recipes, and their comparison: the same for every framework."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from gradscale.demo.run import Comparison, Run, Step, Subject
from gradscale.demo.workers import Workers
from gradscale.formats import FP8_E5M2, FP16, FP32, Format
from gradscale.histogram import best_static_scale
from gradscale.policies.contract import Policy
from gradscale.policies.headroom import Headroom
from gradscale.policies.static import NoScaling, Static

SAMPLE_EVERY = 10
"""Steps from one comparison with FP32's gradients to the next: each costs an FP32 pass."""


@dataclass(frozen=True)
class Recipe:
    """A precision and a policy to train with.

    Attributes:
        name: its name in the table and the plot.
        format: the format of the gradients.
        policy: a policy, or `"auto"`, or `"static"` for the best scale that the gradients of the FP32 run allow.
    """

    name: str
    format: Format
    policy: Any


def recipes(dynamic: Policy | Literal["auto"]) -> tuple[Recipe, ...]:
    """Returns the recipes that every framework compares. FP32 comes first.

    The unscaled recipe has the scale 1 and is checked for overflow like the others, so it differs by underflow alone.
    """
    return (
        Recipe("FP32", FP32, NoScaling()),
        Recipe("FP16 unscaled", FP16, Static(1.0)),
        Recipe("FP16 static", FP16, "static"),
        Recipe("FP16 dynamic", FP16, dynamic),
    )


FP8_RECIPES = (
    Recipe("FP8 unscaled", FP8_E5M2, Static(1.0)),
    Recipe("FP8 dynamic", FP8_E5M2, Headroom(format=FP8_E5M2)),
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


@dataclass(frozen=True)
class Experiment:
    """A model of a framework's demo.

    Attributes:
        subject: what is trained.
        steps: how many steps it needs to learn.
        load: loads the data by a seed, and returns a function that makes a trainer for a recipe.
    """

    subject: Subject
    steps: int
    load: Callable[[int], Callable[[Recipe], Trainer]]


@dataclass(frozen=True)
class Demo:
    """The demo of one framework.

    Attributes:
        recipes: what it compares, in order.
        experiments: what it trains.
        workers: returns the workers that run the training.
    """

    recipes: Sequence[Recipe]
    experiments: Sequence[Experiment]
    workers: Callable[[], AbstractContextManager[Workers]] = Workers

    @property
    def steps(self) -> dict[str, int]:
        """How many steps each model needs, by its name."""
        return {experiment.subject.model: experiment.steps for experiment in self.experiments}


Tick = Callable[[str, str], None]
"""Called after each step with the names of the model and the recipe. Calls may come from several threads."""


def train(recipe: Recipe, trainer: Trainer, steps: int, tick: Callable[[], None]) -> Run:
    """Returns a run of `steps` steps. `tick` is called after each."""
    run = Run(recipe.name)
    for step in range(steps):
        run.add(trainer.step(sample=step % SAMPLE_EVERY == 0))
        tick()
    run.scores = trainer.scores()
    return run


def compare(demo: Demo, plan: Mapping[str, int], seed: int, tick: Tick) -> list[Comparison]:
    """Returns a comparison of all recipes for each model of `plan`, which has their numbers of steps.

    `seed` is that of the data's split, the initial weights and the batches. `tick` is called after each step.
    """
    reference, *others = demo.recipes
    with demo.workers() as workers:

        def submit(subject: Subject, make: Callable[[Recipe], Trainer], recipe: Recipe) -> Future[Run]:
            trainer = make(recipe)  # not in the worker: threads share torch's random numbers

            def checked_tick() -> None:
                workers.check()
                tick(subject.model, recipe.name)

            return workers.submit(lambda: train(recipe, trainer, plan[subject.model], checked_tick))

        chosen = [(one.subject, one.load(seed)) for one in demo.experiments if one.subject.model in plan]
        # All references first: the static scale of a model is made from the gradients of its FP32 run.
        submitted = [[submit(*experiment, reference)] for experiment in chosen]
        for experiment, runs in zip(chosen, submitted, strict=True):
            best = Static(best_static_scale(runs[0].result().histogram, FP16))
            for recipe in others:
                runs.append(submit(*experiment, replace(recipe, policy=best) if recipe.policy == "static" else recipe))
        return [
            Comparison(subject, [run.result() for run in runs])
            for (subject, _), runs in zip(chosen, submitted, strict=True)
        ]
