"""The share of elements above an edge, which `Histogram` follows: over all ranks each element counts once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch.ranks.launch import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gradscale import Histogram
from gradscale.torch import LossScaler

LARGE, SMALL = 0.5, 0.01
"""Gradients that are above the edge of `Histogram` once they are scaled, and below it."""

CASES = [(large, edits) for large in ("whole", "sharded") for edits in (False, True)]


def changes() -> list[list[float]]:
    """Returns, for each case and threshold, by what factor the scale changes.

    Half of the elements are whole on each of the two ranks, the others in shards, and one half has large gradients.
    """
    return [[change(large, edits, threshold) for threshold in (0.45, 0.55)] for large, edits in CASES]


def change(large: str, edits: bool, threshold: float) -> float:
    whole = nn.Parameter(torch.ones(8))
    sharded = nn.Parameter(distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = torch.optim.SGD([whole, sharded], lr=0.125, foreach=False)
    scaler = LossScaler(policy=Histogram(threshold=threshold))
    sizes = (LARGE, SMALL) if large == "whole" else (SMALL, LARGE)
    # Times a tensor in shards: with a number, the gradient would be whole on every rank.
    total: Any = (sharded * torch.full_like(sharded, sizes[1])).sum()
    scaler.backward((whole * sizes[0]).sum() + total.full_tensor())
    if edits:
        with scaler.unscaled(optimizer):
            pass
    result = scaler.step(optimizer)
    return float(result.next_scale / result.scale)


def largest() -> list[float]:
    """Returns the largest magnitude that each of three steps reports: it is on rank 1."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([sharded], lr=0.125)
    scaler = LossScaler(policy=Histogram())
    found: list[float] = []
    for _ in range(3):
        total: Any = (sharded * distribute_tensor(torch.tensor([SMALL, SMALL, SMALL, LARGE]), mesh, [Shard(0)])).sum()
        scaler.backward(total.full_tensor())
        found.append(float(scaler.step(optimizer).amax))  # type: ignore[arg-type]
        optimizer.zero_grad()
    return found


@pytest.mark.cpu_only("gloo")
def test_the_largest_magnitude_beside_the_share_is_that_of_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(2, largest, folder=tmp_path):
        assert found == [LARGE] * 3


@pytest.mark.cpu_only("gloo")
def test_half_of_the_elements_are_half_of_them_however_they_are_spread(tmp_path: Path) -> None:
    for found in run_ranks(2, changes, folder=tmp_path):
        assert found == [[0.5, 1.0]] * len(CASES)
