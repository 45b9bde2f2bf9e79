"""The health of a run on several ranks: all know it, and rank 0 logs it."""

import logging
import math
from pathlib import Path

import torch
from tests.torch.ranks.launch import run_ranks
from torch import nn

from gradscale.torch import LossScaler


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
