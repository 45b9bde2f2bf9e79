"""Training at every level: all of them learn, and those that keep what FP16 loses learn as float32 does."""

from dataclasses import replace
from functools import cache
from statistics import mean, stdev
from typing import get_args

import pytest
import torch
from tests.torch.precision.models import Net, loss_of, train

from gradscale.torch import O0, O2, Precision, prepare
from gradscale.torch.masters import Storage
from gradscale.torch.precision.levels import LEVELS

STEPS = 25
SEEDS = range(3)


@cache
def losses(precision: Precision, seed: int) -> tuple[float, float]:
    """Returns the loss on new images before and after training."""
    torch.manual_seed(seed)
    model = Net()
    made = prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), precision)
    start = loss_of(made[0], 1000).item()
    train(*made, STEPS)
    return start, mean(loss_of(made[0], 1000 + other).item() for other in range(4))


@pytest.mark.filterwarnings("ignore:These parameters are FP16")
@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_goes_down_at_every_level(level: str) -> None:
    start, end = losses(LEVELS[level], seed=0)
    assert end < 0.1 * start


MIXED = {
    "O1": LEVELS["O1"],
    "O1-bf16": LEVELS["O1-bf16"],
    "O2-bf16": LEVELS["O2-bf16"],
    **{f"O2 {storage}": replace(O2, master_weights=storage) for storage in get_args(Storage)},
}


@pytest.mark.not_simulated("every level trains above, and every storage in masters/test_step.py")
@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision_learns_what_float32_learns(name: str) -> None:
    exact = [losses(O0, seed)[1] for seed in SEEDS]
    mixed = [losses(MIXED[name], seed)[1] for seed in SEEDS]
    differences = [abs(one - other) for one, other in zip(mixed, exact, strict=True)]
    # What another seed changes is the noise; a precision must change far less.
    assert max(differences) < 0.1 * stdev(exact)
