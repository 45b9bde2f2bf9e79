"""What a benchmark gives back: a row for each thing measured, with its goal and whether it was met."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.turns import ratio, ratio_quartiles

TIMES = "times"
"""The unit of a row that was timed: how many times as long as the baseline."""


@dataclass(frozen=True)
class Row:
    """One thing measured beside its baseline.

    Attributes:
        benchmark: what was measured.
        baseline: what it is compared with.
        measured: the figure; of timed sides, the ratio of their medians.
        goal: what the figure should be at most; None where it is only shown.
        unit: of the figure and the goal.
        at_least: whether the goal is a floor and not a ceiling.
        quartiles: of timed sides, of their ratios within each round.
        mean: of timed sides, the ratio of their means: it counts what happens only now and then, and a median hides.
        seconds: of timed sides, the median of this one and that of the baseline.
        rounds: of timed sides, how many turns each of them had.
        baseline_measured: the baseline's own figure, where it is not the unit.
        parameters: the size of the model, in rows that differ only in that.
    """

    benchmark: str
    baseline: str
    measured: float
    goal: float | None = None
    unit: str = TIMES
    at_least: bool = False
    quartiles: tuple[float, float] | None = None
    mean: float | None = None
    seconds: tuple[float, float] | None = None
    rounds: int | None = None
    baseline_measured: float | None = None
    parameters: int | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None where there is none."""
        if self.goal is None:
            return None
        return self.measured >= self.goal if self.at_least else self.measured <= self.goal


def compared(
    benchmark: str,
    baseline: str,
    seconds: Sequence[float],
    baseline_seconds: Sequence[float],
    goal: float | None = None,
) -> Row:
    """Returns the row of two sides that took turns.

    Args:
        benchmark: what was measured.
        baseline: what it is compared with.
        seconds: of each turn.
        baseline_seconds: of each turn of the baseline, in the same rounds.
        goal: what the ratio should be at most.
    """
    return Row(
        benchmark,
        baseline,
        measured=ratio(seconds, baseline_seconds),
        goal=goal,
        quartiles=ratio_quartiles(seconds, baseline_seconds),
        mean=statistics.fmean(seconds) / statistics.fmean(baseline_seconds),
        rounds=len(seconds),
        seconds=(statistics.median(seconds), statistics.median(baseline_seconds)),
    )
