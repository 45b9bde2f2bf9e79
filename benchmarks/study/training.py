"""One run: a task trained with a policy, and what is measured of it."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.study.gradients import Gradients, best_scale, exact_gradients
from benchmarks.study.rules import FP32_RUN, RULES
from benchmarks.study.task import Turn
from benchmarks.study.tasks import TASKS

from gradscale import FP16, Format, get_format
from gradscale.torch import LossScaler, ScaleStuck, emulate

EARLY = 50
"""Steps at the start whose gradients are all measured, and among which the best scale is looked for."""

SAMPLED = 50
"""After that the gradients of every 50th step are measured."""

LAST = 100
"""Steps at the end whose mean is the final loss; at most a third of the run."""


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        task: its name.
        rule: the policy's name.
        format: name of the gradients' format.
        clips: whether gradients are clipped.
        seed: of weights and batches.
        steps: how many.
    """

    task: str
    rule: str
    format: str
    clips: bool
    seed: int
    steps: int

    @property
    def key(self) -> str:
        """The name of the row."""
        return f"{self.task} | {self.format} | {'clip' if self.clips else 'no clip'} | seed {self.seed} | {self.rule}"


@dataclass
class Measures:
    """What was seen of a run.

    Attributes:
        scores: the score of each step.
        skipped: optimizer steps that were skipped.
        applied: those that were applied.
        scales: the scale of each optimizer step.
        amax: the largest gradient of each early optimizer step.
        lost: the share of gradient energy that was lost, at sampled steps that did not overflow.
    """

    scores: list[float] = field(default_factory=list)
    skipped: int = 0
    applied: int = 0
    scales: list[float] = field(default_factory=list)
    amax: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    def note(self, gradients: Gradients, format: Format, scale: float, early: bool) -> None:
        """Adds the gradients of a step."""
        if early:
            self.amax.append(gradients.amax)
        if gradients.amax * scale < format.overflow_threshold:
            self.lost.append(gradients.lost(format, scale))

    def summary(self, format: Format) -> dict[str, Any]:
        """Returns the row's figures."""
        last = self.scores[-max(1, min(LAST, len(self.scores) // 3)) :]
        return {
            "skipped": self.skipped,
            "applied": self.applied,
            "steps_to_best": self._steps_to_best(format),
            "lost": sum(self.lost) / len(self.lost) if self.lost else 0.0,
            "final": sum(last) / len(last),
            "last_scale": math.log2(self.scales[-1]) if self.scales else None,
        }

    def _steps_to_best(self, format: Format) -> int | None:
        """Returns how many steps it took to a scale of at least a quarter of the best; None if there was none."""
        if not self.amax:
            return None
        best = best_scale(max(self.amax), format)
        return next((step for step, scale in enumerate(self.scales) if best / 4 <= scale <= best), None)


class Run:
    """A run in progress.

    Args:
        case: what is run.
    """

    def __init__(self, case: Case) -> None:
        spec = TASKS[case.task]
        self.case, self.format = case, get_format(case.format)
        self.task, self.measures = spec.make(case.seed), Measures()
        self._rule = RULES[case.rule]
        self._scaler = LossScaler(self.task.model, self._rule.for_run(self.format, spec.init_scale))

    def step(self, step: int) -> None:
        """Trains for one step."""
        low = self.case.rule != FP32_RUN
        losses = []
        for turn in self.task.turns(step):
            if low and (step < EARLY or step % SAMPLED == 0):
                gradients = exact_gradients(self.task.model, turn.loss)
                self.measures.note(gradients, self.format, self._scale(), early=step < EARLY)
            losses.append(self._turn(turn, emulate(FP16, self.format) if low else nullcontext()))
        self.measures.scores.append(self.task.score(losses))

    def _turn(self, turn: Turn, precision: AbstractContextManager[Any]) -> float:
        """Runs one backward pass and optimizer step, and returns the loss."""
        measures = self.measures
        self.task.model.zero_grad()
        with precision:
            loss = turn.loss()
        measures.scales.append(self._scale())
        self._scaler.backward(loss, retries=0 if measures.applied else self._rule.retries)
        result = self._scaler.step(turn.optimizer, clip_norm=turn.clip_norm if self.case.clips else None)
        skipped = result.skipped()
        measures.skipped += skipped
        measures.applied += not skipped
        return float(loss.detach())

    def _scale(self) -> float:
        return float(self._scaler.loss_scale)


def run(case: Case) -> dict[str, Any]:
    """Returns the row of a case: what was run, and its figures."""
    start, running = time.perf_counter(), Run(case)
    try:
        for step in range(case.steps):
            running.step(step)
    except ScaleStuck:
        running.measures.scores.append(math.inf)  # the model is lost, and so is the final loss
    figures = running.measures.summary(running.format)
    return asdict(case) | figures | {"seconds": round(time.perf_counter() - start, 1)}
