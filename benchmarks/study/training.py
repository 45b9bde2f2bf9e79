"""One run: a task trained with a policy, and what is measured of it."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from benchmarks.study.gradients import Gradients, best_scale, exact_gradients
from benchmarks.study.rules import FP32_RUN, RULES
from benchmarks.study.task import Turn
from benchmarks.study.tasks import TASKS

from gradscale import FP16, Format
from gradscale.formats import get_format
from gradscale.torch import LossScaler, ScaleStuck, emulate

EARLY = 50
"""Steps at the start whose gradients are all measured. Those of the run in FP32 set the best scale."""

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
        scales: the scale that made the gradients of each optimizer step, and whether it was applied.
        amax: the largest gradient of each early optimizer step with a usual batch.
        lost: the share of gradient energy that was lost, at sampled steps that did not overflow.
    """

    scores: list[float] = field(default_factory=list)
    skipped: int = 0
    applied: int = 0
    scales: list[tuple[float, bool]] = field(default_factory=list)
    amax: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    def note_step(self, scale: float, applied: bool) -> None:
        """Adds an optimizer step."""
        self.scales.append((scale, applied))
        self.applied += applied
        self.skipped += not applied

    def note_gradients(self, gradients: Gradients, format: Format, scale: float, *, counts: bool) -> None:
        """Adds the gradients of a step; `counts` is whether the best scale should hold them."""
        if counts:
            self.amax.append(gradients.amax)
        # Where all are zero, as of triplets with a margin, there is nothing to lose.
        if gradients.tensors and gradients.amax * scale < format.overflow_threshold:
            self.lost.append(gradients.lost(format, scale))

    def summary(self, best: float) -> dict[str, Any]:
        """Returns the row's figures; `best` is the best scale."""
        last = self.scores[-max(1, min(LAST, len(self.scores) // 3)) :]
        return {
            "skipped": self.skipped,
            "applied": self.applied,
            "steps_to_best": self._steps_to_best(best),
            "lost": sum(self.lost) / len(self.lost) if self.lost else 0.0,
            "final": sum(last) / len(last),
            "lowest_scale": math.log2(min(self.scales)[0]),
            "last_scale": math.log2(self.scales[-1][0]),
        }

    def _steps_to_best(self, best: float) -> int | None:
        """Returns how many steps came before one that was applied with a good scale; None if there was none.

        Good is at least a quarter of the best, and not above it.
        """
        steps = enumerate(self.scales)
        return next((step for step, (scale, applied) in steps if applied and best / 4 <= scale <= best), None)


class Run:
    """A run in progress.

    Args:
        case: what is run.
    """

    def __init__(self, case: Case) -> None:
        spec = TASKS[case.task]
        self.case, self.format = case, get_format(case.format)
        self.task, self.measures = spec.make(case.seed), Measures()
        self._scaler = LossScaler(self.task.model, RULES[case.rule].for_run(self.format, spec.init_scale))

    def step(self, step: int) -> None:
        """Trains for one step."""
        low = self.case.rule != FP32_RUN
        losses = []
        for turn in self.task.turns(step):
            sampled = step < EARLY or (low and step % SAMPLED == 0)
            # Before the step, which changes the weights.
            gradients = exact_gradients(self.task.model, turn.loss) if sampled else None
            loss, scale = self._turn(turn, emulate(FP16, self.format) if low else nullcontext())
            losses.append(loss)
            if gradients is not None:
                counts = step < EARLY and not turn.bad
                self.measures.note_gradients(gradients, self.format, scale, counts=counts)
        self.measures.scores.append(self.task.score(losses))

    def _turn(self, turn: Turn, precision: AbstractContextManager[Any]) -> tuple[float, float]:
        """Runs one backward pass and optimizer step, and returns the loss and the scale."""
        self.task.model.zero_grad()
        with precision:
            loss = turn.loss()
        self._scaler.backward(loss)
        result = self._scaler.step(turn.optimizer, clip_norm=turn.clip_norm if self.case.clips else None)
        scale = float(result.scale)
        self.measures.note_step(scale, applied=not result.skipped())
        return float(loss.detach()), scale


@cache
def early_amax(task: str, clips: bool, seed: int) -> float:
    """Returns the largest gradient of the early steps in FP32.

    One for all rules and formats: the gradients of a run depend on its rule, which would judge itself by them.
    """
    steps = min(EARLY, TASKS[task].steps)
    running = Run(Case(task, FP32_RUN, "fp32", clips, seed, steps))
    for step in range(steps):
        running.step(step)
    return max(running.measures.amax)


def run(case: Case) -> dict[str, Any]:
    """Returns the row of a case: what was run, and its figures. The time is that of the processor."""
    start, running = time.process_time(), Run(case)
    try:
        for step in range(case.steps):
            running.step(step)
    except ScaleStuck:
        running.measures.scores.append(math.inf)  # the model is lost, and so is the final loss
    figures = running.measures.summary(best_scale(early_amax(case.task, case.clips, case.seed), running.format))
    return asdict(case) | figures | {"cpu_s": round(time.process_time() - start, 2)}
