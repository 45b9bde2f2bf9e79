"""Which steps of a run are sampled, and the samples: rows, dicts and tables of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradscale.formats import FP8_E4M3, FP8_E5M2, FP16, Format, get_format
from gradscale.watching.rows import Sample, WatchRow, rows_of, rows_table

FORMATS = (FP16, FP8_E4M3, FP8_E5M2)
"""What rows have losses of, unless other formats are named."""

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Each `every`-th step from step 0 on; with `steps`, only those in one of the ranges.

    >>> [step for step in range(10) if Schedule(2, [(1, 4), (6, 9)]).samples(step)]
    [2, 6, 8]

    Attributes:
        every: steps from one sample to the next.
        steps: pairs of the first step and the one after the last; None for all steps.
    """

    every: int
    steps: Ranges | None = None

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"`every` must be a positive number of steps. Received: every={self.every!r}.")
        if self.steps is not None:
            # Kept as a tuple: a generator would be used up by the checks.
            object.__setattr__(self, "steps", tuple(_checked_ranges(self.steps)))

    def samples(self, step: int) -> bool:
        """Returns whether a step is sampled."""
        inside = self.steps is None or any(first <= step < end for first, end in self.steps)
        return inside and step % self.every == 0


def _checked_ranges(ranges: Any) -> Iterator[tuple[int, int]]:
    for pair in ranges if hasattr(ranges, "__iter__") else (ranges,):
        try:
            first, end = pair
            right = 0 <= first < end
        except (TypeError, ValueError):  # not two of them, or no numbers
            right = False
        if not right:
            raise ValueError(
                f"`steps` must be pairs of a first step and the one after the last. Received: {pair!r}. "
                "The first hundred are steps=[(0, 100)]."
            )
        yield pair


class WatchRecord:
    """What was recorded at the sampled steps of a run. The `Watch` of every adapter is one.

    Attributes:
        step_index: the step that comes next, or is running.
    """

    def __init__(self, every: int, steps: Ranges | None, formats: Sequence[Format | str]) -> None:
        """Makes a record without samples.

        Args:
            every: steps from one sample to the next, from step 0 on.
            steps: pairs of the first step and the one after the last; only steps in one of them are sampled.
            formats: what rows have losses of.

        Raises:
            ValueError: a format is not known, there is none, or `every` or `steps` are not numbers of steps.
        """
        if not formats:
            raise ValueError(f"`formats` must name at least one format. Received: {formats!r}.")
        self._schedule = Schedule(every, steps)
        self._formats = [get_format(format) for format in formats]
        self._samples: dict[int, Sample] = {}
        self.step_index = 0

    @property
    def sampled(self) -> bool:
        """Whether the step that comes next, or is running, is to be recorded."""
        return self._schedule.samples(self.step_index)

    def clear(self) -> None:
        """Forgets all samples, as after they were written somewhere else."""
        self._samples.clear()

    def rows(self) -> list[WatchRow]:
        """Returns a row for each sampled step and tensor, in order. Computes them from the histograms at each call."""
        return [row for step, sample in self._samples.items() for row in rows_of(sample, step, self._formats)]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns the rows as flat dicts of plain values, for a data frame, a CSV file or a logger."""
        return [row.to_dict() for row in self.rows()]

    def table(self, format: Format | str | None = None) -> str:
        """Returns the rows as text, with what one format loses; by default the first of `formats`.

        Raises:
            ValueError: `format` is none of the formats that are watched.
        """
        chosen = self._formats[0] if format is None else get_format(format)
        if chosen not in self._formats:
            known = ", ".join(each.name for each in self._formats)
            raise ValueError(f"`format` must be one that is watched: {known}. Received: {chosen.name}.")
        return rows_table(self.rows(), chosen)
