"""How sides are timed: in turn, for as many rounds as a busy machine allows."""

import gc
import time
from collections.abc import Callable, Mapping

from benchmarks.turns import Side, take_turns

QUICK_S, FULL_S = 5.0, 60.0
"""Seconds that the rounds of a comparison may take together. With a core taken away, threads that wait for each other
make a step of many tensors up to a hundred times slower."""

FEWEST = 3
"""Rounds that a comparison gets however slow they are."""


def timed(
    make_sides: Callable[[], Mapping[str, Side]], repeats: int, quick: bool, fewest: int = FEWEST
) -> dict[str, list[float]]:
    """Returns the seconds of the sides, which take turns; they are made here, and their memory is free afterwards.

    Args:
        make_sides: makes the sides.
        repeats: rounds that count, if the machine is not too busy for them.
        quick: whether to give up sooner on them.
        fewest: rounds that count, however long they take.
    """
    gc.collect()
    sides = make_sides()
    affordable = (QUICK_S if quick else FULL_S) / _round_s(sides)
    return take_turns(sides, max(fewest, min(repeats, int(affordable))))


def _round_s(sides: Mapping[str, Side]) -> float:
    """Returns how many seconds it takes until every side has had its turn, preparations included."""
    start = time.perf_counter()
    for side in sides.values():
        side.turn()
    return time.perf_counter() - start
