"""What a round finds that no rank can go on with, and the errors that all of them raise."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradscale.torch.ranks.errors import (
    RankFailed,
    ScaleDesync,
    check_arguments,
    refuse_distinct,
    refuse_other_calls,
)
from gradscale.torch.ranks.packet import Facts
from gradscale.torch.ranks.store import reasons
from gradscale.torch.step.host_copy import HostCopy

SAME_SCALE = 1e-6
"""Relative difference of scales that are taken to be the same: sums of their squares are rounded."""

SAME_GRADIENTS = 1e-4
"""Relative difference of squared norms that are taken to be the same: ranks may sum them in another order."""


class Faults:
    """The faults that the sums of a round show, the same on every rank.

    Attributes:
        any: above 0 if there is one that keeps the step from being applied, a 0-d tensor.
    """

    def __init__(self, facts: Facts, scale: Tensor, group: Any) -> None:
        self._group, self._scale = group, scale
        ranks = dist.get_world_size(group)
        # What all of them have missed at once, nobody has applied.
        missed = (facts.missed > 0) & (facts.missed < ranks)
        failed = (facts.failed > 0) & (facts.failed < ranks)
        elsewhere = (facts.asks_flags > 0) & (facts.asks_flags < ranks)
        parted = _differ(facts.scale, facts.scale_squared, ranks, SAME_SCALE)
        distinct = _differ(facts.same, facts.same_squared, facts.holders, SAME_GRADIENTS)
        self.any = failed.double() + missed + elsewhere + parted + distinct
        self._copy = HostCopy(
            failed * facts.failed,
            missed * facts.missed,
            facts.failed_rank,
            elsewhere * facts.asks_flags,
            parted,
            distinct,
            facts.sends_amax,
            facts.asks_norm,
            facts.follows,
        )

    def raise_any(self) -> None:
        """Raises the first fault, if there is one. Waits for the numbers of the round, not for work queued since."""
        failed, missed, ranks, asked, parted, distinct, sent_amax, asked_norm, follow = map(round, self._copy.read())
        if failed or missed:
            raise RankFailed(reasons(failed + missed, ranks, self._group), applied=missed > 0)
        if asked:
            refuse_other_calls(asked, dist.get_world_size(self._group))
        if parted:
            raise ScaleDesync(dict(gathered((dist.get_rank(), float(self._scale)), self._group)))
        if distinct:
            refuse_distinct()
        check_arguments(dist.get_world_size(self._group) - follow, amax=sent_amax, norm=asked_norm)


def refuse_distinct_meshes(rows: Sequence[Mapping[tuple[int, ...], float]]) -> None:
    """Raises if meshes that are taken to hold the same do not, or a rank is in none of them.

    `rows` has, for every rank, the sum of squares that it holds of each mesh that it is in.
    """
    totals: dict[tuple[int, ...], float] = {}
    for row in rows:
        for members, squares in row.items():
            totals[members] = totals.get(members, 0.0) + squares
    for meshes in _alike(list(totals), len(rows)):
        sizes = [totals[members] for members in meshes]
        covered = len(meshes) * len(meshes[0]) == len(rows)
        if not covered or max(sizes) - min(sizes) > SAME_GRADIENTS * max(sizes):
            refuse_distinct("gradients on meshes that do not hold the same, or that some ranks are not in")


def _alike(meshes: Sequence[tuple[int, ...]], ranks: int) -> list[list[tuple[int, ...]]]:
    """Returns the meshes, each a tuple of ranks, in groups that are taken to hold the same.

    Those of one dimension of a larger mesh: its rows, or its columns, which are of the same size in a square one. They
    have the same steps between their ranks. If these are not all `ranks`, those of one size.
    """
    found: dict[Any, list[tuple[int, ...]]] = {}
    for members in meshes:
        found.setdefault(tuple(member - members[0] for member in members), []).append(members)
    joined: dict[Any, list[tuple[int, ...]]] = {}
    for steps, group in found.items():
        joined.setdefault(steps if len(group) * len(steps) == ranks else len(steps), []).extend(group)
    return list(joined.values())


def gathered(value: Any, group: Any) -> list[Any]:
    """Returns the value of every rank. Every rank must call it. Synchronizes with the device."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, value, group=group)
    return rows


def _differ(total: Any, squares: Any, count: Any, tolerance: float) -> Tensor:
    """Returns whether `count` numbers, whose sum and sum of squares are given, differ relative to their mean."""
    # Their variance, times the square of the count: 0 where all are equal.
    return count * squares - total * total > tolerance**2 * total * total
