"""How often ranks wait for each other in a step, counted; and what is sent to no one."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF, NAN
from tests.torch.ranks.counting import counting
from tests.torch.ranks.gpt import GPT, ROUNDED, batch_of
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.layouts import LAYOUTS, needs_sharding
from tests.torch.versions import SHARDS_ON_CPU

from gradscale import Dynamic, Policy
from gradscale.policies.headroom import Headroom
from gradscale.torch import LossScaler

CASES: list[tuple[str, Literal["auto", "always"], Policy, float | None, bool]] = [
    ("DDP on 2", "auto", Dynamic(), None, False),
    ("DDP on 2", "auto", Dynamic(), 1.0, True),
    ("DDP on 2", "auto", Headroom(), 1.0, False),
    ("DDP on 2", "always", Dynamic(), 1.0, False),
    ("FSDP2 on 2", "auto", Dynamic(), None, False),
    ("FSDP2 on 2", "auto", Dynamic(), 1.0, True),
    ("FSDP2 on 2", "auto", Headroom(), 1.0, False),
    ("TP on 2", "auto", Dynamic(), 1.0, False),
    ("SP on 2", "auto", Dynamic(), 1.0, False),
    ("HSDP on 2x2", "auto", Dynamic(), 1.0, False),
    ("FSDP2 x TP on 2x2", "auto", Dynamic(), 1.0, False),
]
CASES = [case for case in CASES if SHARDS_ON_CPU or not needs_sharding(case[0])]
FIRST, CLEAN, BAD_LOSS, BAD_BACKWARD, LAST = range(5)


def rounds_of(
    name: str, agree: Literal["auto", "always"], policy: Policy, clip: float | None, fused: bool
) -> list[tuple[str, list[str], float, int]]:
    """Returns the status, the rounds, the next scale and the number of culprits of each step."""
    layout, rank = LAYOUTS[name], dist.get_rank()
    model = layout.spread(GPT(ROUNDED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = LossScaler(model, policy, agree=agree)
    found: list[tuple[str, list[str], float, int]] = []
    for step in range(5):
        inputs, targets = batch_of(step, layout.part(rank), layout.parts)
        loss = ROUNDED.loss(model(inputs), targets)
        if step == BAD_LOSS and rank == 1:
            loss = loss.detach() * NAN + loss  # not finite, and its gradients are
        if step == BAD_BACKWARD and rank == 0:
            loss.register_hook(lambda grad: grad * INF)
        scaler.backward(loss)
        with counting() as begun:
            result = scaler.step(optimizer, clip_norm=clip)
        optimizer.zero_grad()
        found.append((str(result.status()), begun, result.next_scale.item(), len(result.culprits())))
    return found


def on_ranks() -> dict[int, Any]:
    ranks = dist.get_world_size()
    return {number: rounds_of(*case) for number, case in enumerate(CASES) if LAYOUTS[case[0]].ranks == ranks}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What every rank has counted, by the number of ranks."""
    folder: Path = tmp_path_factory.mktemp("rounds")
    return {ranks: run_ranks(ranks, on_ranks, folder=folder / str(ranks)) for ranks in (2, 4)}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_a_clean_step_has_one_round_and_under_ddp_none(number: int, reports: dict[int, list[Any]]) -> None:
    name, agree, *_ = CASES[number]
    quiet = name.startswith("DDP") and agree == "auto"
    for steps in (report[number] for report in reports[LAYOUTS[name].ranks]):
        # Under DDP a loss that is not finite on one rank, and whose gradients are, is applied, as with torch.
        bad_loss = "applied" if quiet else "nonfinite_loss"
        assert [status for status, *_ in steps] == ["applied", "applied", bad_loss, "overflow", "applied"]
        assert steps[FIRST][1] == ["all_reduce"], "the first step compares the scales"
        for step in (CLEAN, LAST, *[BAD_LOSS] * quiet):
            assert steps[step][1] == ([] if quiet else ["all_reduce"])
        for step in (BAD_BACKWARD, *[BAD_LOSS] * (not quiet)):
            names = ["broadcast", "all_reduce", "all_reduce"] if steps[step][3] else []
            assert steps[step][1] == ["all_reduce", "all_reduce", *names], "whose loss it was, and which parameters"


def test_ranks_have_the_same_scales_and_name_the_same_number_of_parameters(reports: dict[int, list[Any]]) -> None:
    for of_all in reports.values():
        assert all(report == of_all[0] for report in of_all)
