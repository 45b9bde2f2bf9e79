"""Training runs and their comparison: the results of every framework's demo, for the table and the plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradscale.histogram import EXPONENTS, ExponentHistogram, exponent_histogram

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        model: its short name.
        loss_title: which loss is plotted.
        scores: the metrics on test data, with the format of their numbers. The first shows whether FP16 has failed.
        caption: what the columns mean.
    """

    model: str
    loss_title: str
    scores: Mapping[str, str]
    caption: str


@dataclass(frozen=True)
class Gradients:
    """The gradients of one step, and the FP32 gradients of the same weights and batch.

    Attributes:
        kept: the step's own gradients of the parameters, scaled or not.
        reference: the FP32 gradients of the parameters, in the same order.
        activations: the FP32 gradients of the activations.
    """

    kept: Sequence[Array]
    reference: Sequence[Array]
    activations: Sequence[Array]

    def lost(self) -> float:
        """Returns the share of the parameters' nonzero FP32 gradients that are zero in `kept`."""
        nonzero = sum(np.count_nonzero(reference) for reference in self.reference)
        pairs = zip(self.kept, self.reference, strict=True)
        return sum(np.count_nonzero((kept == 0) & (reference != 0)) for kept, reference in pairs) / max(1, nonzero)


@dataclass(frozen=True)
class Step:
    """One training step: the loss that is plotted, the scale, and the gradients if they were sampled."""

    loss: float
    scale: float
    skipped: bool
    grads: Gradients | None


@dataclass
class Run:
    """A training run.

    Attributes:
        recipe: name of its recipe.
        losses: the loss that is plotted, at each step.
        scales: the scale at each step.
        sampled: the steps that were applied and whose gradients were compared with FP32's.
        lost: share of the parameters' gradients lost to zero at those steps.
        histogram: exponents of the unscaled FP32 gradients, of parameters and activations, at all compared steps.
        skipped: the steps that were skipped.
        scores: the metrics after training, by name.
    """

    recipe: str
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    histogram: ExponentHistogram = field(default_factory=lambda: ExponentHistogram(np.zeros(EXPONENTS.size, np.int64)))
    skipped: list[int] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        """Appends a step."""
        index = len(self.losses)
        self.losses.append(step.loss)
        self.scales.append(step.scale)
        if step.skipped:
            self.skipped.append(index)
        if step.grads is not None:
            self.histogram += exponent_histogram([*step.grads.reference, *step.grads.activations])
            if not step.skipped:  # nothing of a skipped step is applied; some adapters return zeros for it
                self.sampled.append(index)
                self.lost.append(step.grads.lost())

    def share_lost(self) -> float:
        """Returns the mean share of gradients lost to zero; NaN if every step that was compared was skipped."""
        return float(np.mean(self.lost)) if self.lost else float("nan")

    def final_loss(self) -> float:
        """Returns the mean loss of the last 20 steps."""
        return float(np.mean(self.losses[-20:]))


@dataclass(frozen=True)
class Comparison:
    """The same training with every recipe.

    Attributes:
        subject: what was trained.
        runs: a run for each recipe, in order; FP32 comes first.
        untrained: the scores of the initial weights.
        other_seeds: FP32's scores with other seeds, by the seed.
    """

    subject: Subject
    runs: Sequence[Run]
    untrained: Mapping[str, float]
    other_seeds: Mapping[int, Mapping[str, float]]
