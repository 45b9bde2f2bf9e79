"""The culprits of all ranks: the same on each, whoever holds them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks

from gradscale.engine.culprits import Culprit
from gradscale.torch.ranks.round import MOST_CULPRITS, Rounds

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

HELD: dict[str, list[list[Culprit]]] = {
    "nobody": [[], [], []],
    "all the same": [[Culprit("a", "inf", 2), Culprit("b", "nan", 1)]] * 3,
    "other kinds and counts": [[Culprit("a", "inf", 2)], [Culprit("a", "nan", 5)], [Culprit("a", "inf")]],
    "other names": [[], [Culprit("größe", "inf", 1)], [Culprit("b", "nan"), Culprit("größe", "inf", 3)]],
    "too many": [[Culprit(f"{rank}.{index}", "inf", 1) for index in range(70)] for rank in range(3)],
}
"""Culprits that each of three ranks holds."""


def gathered() -> dict[str, Any]:
    return {name: Rounds().culprits(held[dist.get_rank()], torch.device("cpu")) for name, held in HELD.items()}


def gathered_in_a_group() -> list[Culprit]:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    return Rounds(group=group).culprits([Culprit(str(dist.get_rank()), "inf", 1)], torch.device("cpu"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Culprit]]:
    """What the ranks have found, which is the same on all of them."""
    first, *others = run_ranks(3, gathered, folder=tmp_path_factory.mktemp("culprits"))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nobody", []),
        ("all the same", [Culprit("a", "inf", 2), Culprit("b", "nan", 1)]),
        ("other kinds and counts", [Culprit("a", "nan", 5)]),
        ("other names", [Culprit("größe", "inf", 3), Culprit("b", "nan")]),
    ],
)
def test_a_culprit_has_the_worst_kind_and_the_largest_count_of_all_ranks(
    found: Any, name: str, expected: list[Culprit]
) -> None:
    assert found[name] == expected


def test_the_first_hundred_are_named_those_of_the_lowest_ranks(found: Any) -> None:
    expected = [culprit for held in HELD["too many"] for culprit in held]
    assert found["too many"] == expected[:MOST_CULPRITS]


def test_a_group_names_its_own(tmp_path: Path) -> None:
    expected = [Culprit("1", "inf", 1), Culprit("2", "inf", 1)]
    assert run_ranks(3, gathered_in_a_group, folder=tmp_path) == [[], expected, expected]
