"""Ranks with unequal numbers of batches, inside torch's `Join`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import NAN
from tests.torch.ranks.launch import run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join

from gradscale import Dynamic, NoScaling, Policy
from gradscale.policies.headroom import Headroom
from gradscale.torch import LossScaler

CASES: list[tuple[Policy, float | None]] = [
    (policy, clip) for policy in (Dynamic(growth_interval=3), Headroom(), NoScaling()) for clip in (None, 1.0)
]
BAD_BATCH = 5
"""Only rank 1 gets this far."""


def train(policy: Policy, clip_norm: float | None) -> list[Any]:
    """Returns state and weights after epochs in which rank 1 has four batches more than rank 0.

    Those are more steps than there are between two that read the largest gradient for the metrics.
    """
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, policy)
    for _ in range(4):
        with Join([model, scaler]):  # type: ignore[list-item]
            for index in range(3 + 4 * dist.get_rank()):
                optimizer.zero_grad()
                loss = model(torch.full((2, 4), 1.0 + index)).square().mean()
                scaler.backward(loss * NAN if index == BAD_BATCH else loss)
                scaler.step(optimizer, clip_norm=clip_norm)
    return [scaler.state_dict(), [parameter.detach().clone() for parameter in model.parameters()]]


def refusal() -> str:
    """Returns what is raised inside a `Join` of the model alone."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic())
    try:
        with model.join():
            scaler.backward(model(torch.ones(2, 4)).sum())
            scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


def on_ranks() -> list[Any]:
    return [[train(*case) for case in CASES], refusal()]


def test_ranks_without_batches_follow_the_others_and_a_join_without_the_scaler_is_refused(tmp_path: Path) -> None:
    (first, refused), (second, refused_too) = run_ranks(2, on_ranks, folder=tmp_path)
    for case, one, other in zip(CASES, first, second, strict=True):
        assert one[0] == other[0], case
        torch.testing.assert_close(one[1], other[1], rtol=0, atol=0, equal_nan=True)
    assert refused == refused_too
    assert "Join([model, scaler])" in refused


def test_the_scaler_may_not_come_first() -> None:
    from gradscale.torch.ranks.ddp import check_joins

    class Config:
        enable = True
        is_first_joinable = True

    with pytest.raises(RuntimeError, match="the scaler as the first"):
        check_joins(True, Config())
