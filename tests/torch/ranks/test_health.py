"""The health of a run on several ranks: all know it, and rank 0 logs it."""

import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks
from torch import nn

from gradscale.torch import LossScaler


def nan_on_one_rank() -> tuple[str, str]:
    """Returns what the health of a rank says, and its probe, after a NaN in the batch of the second rank."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    scaler, optimizer = LossScaler(model), torch.optim.SGD(model.parameters(), lr=1e-2)
    good = torch.full((3, 4), 1.0)
    x = good if dist.get_rank() == 0 else good * math.nan
    for batch in (good, good, x):
        scaler.backward(model(batch).square().mean())
        scaler.step(optimizer)
        optimizer.zero_grad()
    said = scaler.health().advice
    return said, str(scaler.probe(lambda: model(x).square().mean()))


def found() -> tuple[list[str], list[str]]:
    """Returns the conditions that a rank has found, and what it has logged."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    scaler, optimizer = LossScaler(model), torch.optim.SGD(model.parameters(), lr=1e-2)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradscale.engine.health").addHandler(handler)
    conditions: list[str] = []
    for number in range(6):
        x = torch.full((3, 4), math.nan if number in (2, 3) else 1.0)
        scaler.backward(model(x).square().mean())
        scaler.step(optimizer)
        optimizer.zero_grad()
        conditions.append(scaler.health().condition.value)
    return conditions, lines


def test_every_rank_knows_it_and_the_first_logs_it_once(tmp_path: Path) -> None:
    (first, logged), (second, silent) = run_ranks(2, found, folder=tmp_path)
    assert first == second
    assert first == ["ok", "ok", "nonfinite_loss", "nonfinite_loss", "ok", "ok"]
    (line,) = logged  # once, and recoveries are logged as information only
    assert line.startswith("nonfinite_loss: 2 updates in 3 steps. The loss was inf or NaN in 1 of 1 step")
    assert silent == []


def test_each_rank_says_whether_its_own_loss_was_not_finite(tmp_path: Path) -> None:
    (first, sound), (second, bad) = run_ranks(2, nan_on_one_rank, folder=tmp_path)
    assert "On this rank, 0 of 2, it is finite, and it is not on another." in first
    assert "On this rank, 1 of 2, it is not finite." in second
    assert "broken_data: an input, float32 of shape [3, 4] is inf or NaN" in bad
    assert "finite: loss and gradients are finite" in sound
    assert "on this rank, not on 1." in sound
