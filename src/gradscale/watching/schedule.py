"""Which steps are sampled."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
