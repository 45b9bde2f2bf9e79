"""`ShardedGradScaler` on the flat shards of FSDP1: ranks decide alike, where those with torch's class part."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF
from tests.torch.ranks.launch import run_ranks
from torch import nn

from gradscale.policies.headroom import Headroom
from gradscale.torch import ShardedGradScaler

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

CASES = [(how, original, explicit) for how in ("fused", "foreach") for original in (False, True) for explicit in (0, 1)]
"""The optimizer, whether FSDP1 shows the original parameters or flat ones, and whether `unscale_` is called."""

CASES_OF_TORCH = [case for case in CASES if case[0] != "fused" or not case[2]]
"""Those that torch's class can run: its flag of `unscale_` has a shape that fused kernels refuse on a CPU."""


def steps_of(scaler: Any, how: str, original: bool, explicit: int) -> list[tuple[bool, float]]:
    """Returns whether each step was applied on this rank, and the next scale. One fault is in a shard of rank 1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=original, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=how == "fused", foreach=how == "foreach")
    found: list[tuple[bool, float]] = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()).backward()
        if step == 1 and dist.get_rank() == 1:
            # With the original parameters, a rank has no elements of some of them.
            grad = [each.grad for each in model.parameters() if each.grad is not None and each.grad.numel()][-1]
            grad.view(-1)[0] = INF
        if explicit:
            scaler.unscale_(optimizer)
        before = [each.detach().clone() for each in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        found.append((not same, scaler.get_scale()))
    return found


def on_ranks() -> dict[Any, Any]:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

    numbers = {"init_scale": 2.0**10, "growth_interval": 2}
    found: dict[Any, Any] = {
        (name, case): steps_of(kind("cpu", **numbers), *case)
        for name, kind in (("ours", ShardedGradScaler), ("torch", TorchSharded))
        for case in (CASES if name == "ours" else CASES_OF_TORCH)
    }
    found["policy"] = steps_of(ShardedGradScaler("cpu", policy=Headroom()), "fused", True, 0)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found["group"] = steps_of(ShardedGradScaler("cpu", **numbers, process_group=alone), "fused", False, 0)
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder: Path = tmp_path_factory.mktemp("sharded") / "ranks"
    return run_ranks(2, on_ranks, folder=folder)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_decide_alike(case: Any, reports: list[dict[Any, Any]]) -> None:
    expected = [(True, 2.0**10), (False, 2.0**9), (True, 2.0**9), (True, 2.0**10)]
    assert [report["ours", case] for report in reports] == [expected, expected]


@pytest.mark.parametrize("case", CASES_OF_TORCH, ids=str)
def test_ranks_with_torchs_class_part_if_the_optimizer_is_fused(case: Any, reports: list[dict[Any, Any]]) -> None:
    first, second = (report["torch", case] for report in reports)
    assert (first != second) == (case[0] == "fused")


def test_a_policy_sees_the_sizes_of_all_ranks(reports: list[dict[Any, Any]]) -> None:
    assert reports[0]["policy"] == reports[1]["policy"]
    assert [applied for applied, _ in reports[0]["policy"]] == [True, False, True, True]


def test_the_process_group_names_the_ranks(reports: list[dict[Any, Any]]) -> None:
    assert [[applied for applied, _ in report["group"]] for report in reports] == [
        [True, True, True, True],
        [True, False, True, True],
    ]
