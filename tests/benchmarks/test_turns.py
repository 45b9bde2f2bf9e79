"""Sides that take turns: the order, what the clock sees, and the ratios made of it."""

import pytest
from benchmarks.turns import WARM_UP, Side, ratio, ratio_quartiles, take_turns


def test_each_round_begins_with_another_side() -> None:
    order: list[str] = []
    sides = {name: Side(run=lambda name=name: order.append(name)) for name in "abc"}
    take_turns(sides, repeats=4 - WARM_UP)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"


def test_turns_that_warm_up_are_run_and_not_counted() -> None:
    runs: list[int] = []
    seconds = take_turns({"only": Side(run=lambda: runs.append(1))}, repeats=3)
    assert len(runs) == WARM_UP + 3
    assert len(seconds["only"]) == 3


def test_the_clock_runs_between_the_two_synchronizations(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def clock() -> float:
        happened.append("clock")
        return float(len(happened))

    monkeypatch.setattr("benchmarks.turns.time.perf_counter", clock)
    side = Side(*(lambda name=name: happened.append(name) for name in ("run", "prepare", "synchronize")))
    assert side.turn() == 3.0
    assert happened == ["prepare", "synchronize", "clock", "run", "synchronize", "clock"]


def test_a_ratio_is_one_of_medians_and_its_quartiles_are_of_rounds() -> None:
    own, other = [1.0, 20.0, 3.0], [2.0, 10.0, 2.0]
    assert ratio(own, other) == 1.5
    assert ratio_quartiles(own, other) == (1.0, 1.75)


def test_rounds_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        ratio_quartiles([1.0, 2.0], [1.0])
