"""What the demo of every framework makes, and the table and the picture show: runs, compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradscale.histogram import EXPONENTS, ExponentHistogram

WAYS = ("FP32", "FP16 unscaled", "FP16 static", "FP16 dynamic")
"""The ways to train that every framework compares."""

FP8_WAYS = ("FP8 unscaled", "FP8 dynamic")
"""Those that are compared where FP8 can be emulated."""

SAMPLE_EVERY = 10
"""Steps between two looks at what a run has lost: each costs a pass in FP32."""


@dataclass(frozen=True)
class Score:
    """Something that is measured on test data when a run is done.

    Attributes:
        name: heading of its column.
        spec: how its number is written, as in a format string.
    """

    name: str
    spec: str


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        model: its short name.
        loss_title: what the loss that is shown is a loss of.
        scores: what is measured in the end. The first says whether it has learned what it was to learn.
        caption: what the columns mean.
    """

    model: str
    loss_title: str
    scores: tuple[Score, ...]
    caption: str


@dataclass
class Run:
    """What became of a training run.

    Attributes:
        way: how it was trained, by name.
        losses: the loss that is shown, at each step.
        scales: the scale at each step.
        sampled: the steps at which the next was sampled.
        lost: share of the parameters' gradients that FP32 has and the run has lost to zero, at the same weights.
        histogram: exponents of the true gradients, of parameters and activations, at those steps.
        skipped: the steps that were skipped.
        scores: what was measured in the end, by name.
    """

    way: str
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    histogram: ExponentHistogram = field(default_factory=lambda: ExponentHistogram(np.zeros(EXPONENTS.size, np.int64)))
    skipped: list[int] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The same training in all the ways.

    Attributes:
        subject: what was trained.
        runs: a run for each way, in order.
    """

    subject: Subject
    runs: Sequence[Run]


Tick = Callable[[str, str], None]
"""Called after each step with the name of the model and that of the way. May come from several threads."""


@dataclass(frozen=True)
class Demo:
    """The demo of one framework.

    Attributes:
        ways: the ways it compares, in order.
        steps: the models it can train, by short name, and how many steps each needs to learn.
        compare: trains the models that it is given, each for so many steps, with a seed; tells each step; returns a
            comparison for each model.
    """

    ways: Sequence[str]
    steps: Mapping[str, int]
    compare: Callable[[Mapping[str, int], int, Tick], list[Comparison]]
