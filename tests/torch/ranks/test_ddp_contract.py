"""The contract under plain DDP: all ranks decide the same, and a rank that raises ends the run by its process group."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import NAN
from tests.torch.ranks.launch import Ranks, run_ranks
from torch import nn

from gradscale import Dynamic
from gradscale.torch import LossScaler

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

TIMEOUT_S = 3.0
STAYS_S = 12.0


def setup(group: Any = None) -> tuple[nn.Module, torch.optim.Optimizer, LossScaler]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1), process_group=group)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), LossScaler(model, Dynamic(), group=group)


def bad_losses() -> tuple[list[str], list[float]]:
    """Returns statuses and weights. The loss of rank 1 is NaN at the first and third step, its gradients are finite."""
    model, optimizer, scaler = setup()
    found: list[str] = []
    for step in range(4):
        loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
        scaler.backward(loss + loss.detach() * NAN if dist.get_rank() == 1 and step in (0, 2) else loss)
        found.append(str(scaler.step(optimizer).status()))
        optimizer.zero_grad()
    return found, [value for each in model.parameters() for value in each.flatten().tolist()]


def test_a_nan_loss_of_one_rank_with_finite_reduced_gradients_is_applied_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, bad_losses, folder=tmp_path)
    assert first == second
    assert first[0] == ["applied"] * 4
    assert all(abs(value) < 1e3 for value in first[1])


def forgets_to_scale(clean_steps: int, folder: Path) -> tuple[str, str, float]:
    """Rank 1 forgets to scale, and its process stays. Returns the error of this rank and how long it took."""
    ended = folder / "ended"
    group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))
    model, optimizer, scaler = setup(group)
    begun = time.monotonic()
    try:
        for step in range(clean_steps + 2):
            loss = model(torch.ones(2, 4)).mean()
            loss.backward() if dist.get_rank() == 1 and step == clean_steps else scaler.backward(loss)
            scaler.step(optimizer)
            optimizer.zero_grad()
    except RuntimeError as error:
        elapsed_s = time.monotonic() - begun
        if dist.get_rank() == 0:
            ended.touch()
        while dist.get_rank() == 1 and not ended.exists() and time.monotonic() - begun < STAYS_S:
            time.sleep(0.05)
        return type(error).__name__, str(error), elapsed_s
    return "", "", 0.0


@pytest.mark.parametrize("clean_steps", [0, 2])
def test_a_rank_that_forgets_to_scale_raises_and_the_others_end_by_the_timeout(
    clean_steps: int, tmp_path: Path
) -> None:
    other, forgets = run_ranks(2, forgets_to_scale, clean_steps, tmp_path, folder=tmp_path / "ranks")
    assert "`step` needs gradients of a scaled loss" in forgets[1]
    assert forgets[2] < STAYS_S
    assert other[0]
    assert other[2] < STAYS_S


def ends_when_refused() -> None:
    model, optimizer, scaler = setup()
    for step in range(1000):
        scaler.backward(model(torch.ones(2, 4)).mean())
        scaler.step(optimizer, clip_norm=-1.0 if dist.get_rank() == 1 and step == 2 else 1.0)
        optimizer.zero_grad()


def test_a_rank_that_ends_when_it_is_refused_ends_the_others(tmp_path: Path) -> None:
    ranks = Ranks(2, ends_when_refused, (), tmp_path)
    assert ranks.wait() == [1, 1]
    assert "`clip_norm` must be" in ranks.output(1)
    assert "RuntimeError" in ranks.output(0)
