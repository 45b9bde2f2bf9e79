"""Ranks that have no gradients in a step: they decide and count as the others do."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks
from torch import nn

from gradscale import Dynamic, Headroom, Histogram, Policy
from gradscale.torch import LossScaler, StepResult

POLICIES: list[Policy] = [Dynamic(growth_interval=3), Headroom(), Histogram()]
STEPS = 20
"""More than there are between two steps at which the largest gradient is read for the metrics."""


def facts(scaler: LossScaler, result: StepResult) -> tuple[Any, ...]:
    sizes = [None if size is None else float(size) for size in (result.grad_norm, result.amax)]
    return str(result.status()), *sizes, float(result.next_scale), repr(scaler.metrics())


def idle(policy: Policy, norm: bool) -> list[tuple[Any, ...]]:
    """Returns what this rank sees of every step. Rank 1 has no gradients in some, and no rank has any in one."""
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = LossScaler(layer, policy, distinct=dist.group.WORLD)
    found: list[tuple[Any, ...]] = []
    for step in range(STEPS):
        scaler.backward(layer(torch.ones(2, 3)).square().mean())
        if step == 5 or (dist.get_rank() == 1 and step in (0, 3, 17)):
            optimizer.zero_grad()
        found.append(facts(scaler, scaler.step(optimizer, norm=norm)))
        optimizer.zero_grad()
    return found


def frozen(policy: Policy) -> list[tuple[Any, ...]]:
    """Returns what this stage of a pipeline sees of every step. That of rank 1 has no parameter that is trained."""
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(3, 3).requires_grad_(dist.get_rank() == 0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = LossScaler(layer, policy, distinct=dist.group.WORLD)
    loss_of = scaler.wrap_loss(lambda output: output.square().mean())
    found: list[tuple[Any, ...]] = []
    for _ in range(STEPS):
        output = layer(torch.ones(2, 3, requires_grad=True))
        (loss_of(output) if dist.get_rank() == 0 else output.sum()).backward()
        found.append(facts(scaler, scaler.step(optimizer)))
        optimizer.zero_grad()
    return found


def on_ranks() -> list[Any]:
    return [[idle(policy, norm=norm) for norm in (False, True)] + [frozen(policy)] for policy in POLICIES]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("without") / "ranks"
    return run_ranks(2, on_ranks, folder=folder)


@pytest.mark.parametrize("index", range(len(POLICIES)), ids=lambda index: type(POLICIES[index]).__name__)
def test_a_rank_without_gradients_sees_what_the_others_see(reports: list[Any], index: int) -> None:
    for first, second in zip(*(report[index] for report in reports), strict=True):
        assert first == second


@pytest.mark.parametrize("index", range(len(POLICIES)), ids=lambda index: type(POLICIES[index]).__name__)
def test_a_step_counts_if_any_rank_has_gradients(reports: list[Any], index: int) -> None:
    for found in reports[0][index][:2]:
        statuses = [status for status, *_ in found]
        assert [step for step, status in enumerate(statuses) if status == "no_grads"] == [5]
        assert "'applied': 19.0" in found[-1][-1]
