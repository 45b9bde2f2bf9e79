"""Times several implementations in one run: they take turns, so that other load affects all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WARM_UP = 2
"""Turns that are not counted: the first calls allocate, and fill caches."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the implementations that are compared.

    Attributes:
        run: what is timed.
        prepare: called before `run`, and not timed.
        synchronize: returns once the device is idle; called before the clock starts and before it stops.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    synchronize: Callable[[], object] = lambda: None

    def turn(self) -> float:
        """Returns how many seconds one run took."""
        self.prepare()
        self.synchronize()
        start = time.perf_counter()
        self.run()
        self.synchronize()
        return time.perf_counter() - start


def take_turns(sides: Mapping[str, Side], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of every run of every side, in `repeats` rounds after the warm-up."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(WARM_UP + repeats):
        # Each round begins with another side: the first of a round may find colder caches.
        first = round_index % len(names)
        for name in names[first:] + names[:first]:
            taken = sides[name].turn()
            if round_index >= WARM_UP:
                seconds[name].append(taken)
    return seconds


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the ratio of the medians.

    >>> ratio([1.0, 2.0, 9.0], [4.0, 4.0, 4.0])
    0.5
    """
    return statistics.median(seconds) / statistics.median(baseline)


def ratio_quartiles(seconds: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Returns the first and the third quartile of the ratios, each of two turns in the same round.

    Other load affects both turns of a round, so that these are closer together than the quartiles of the seconds.

    >>> ratio_quartiles([1.0, 2.0, 3.0], [2.0, 2.0, 2.0])
    (0.75, 1.25)
    """
    by_round = [own / other for own, other in zip(seconds, baseline, strict=True)]
    low, _, high = statistics.quantiles(by_round, n=4, method="inclusive")
    return low, high
