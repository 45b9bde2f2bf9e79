"""Two processes that share a scale: what one of them sees, both act on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.torch.helpers import INF, NAN, poison
from tests.torch.process_group import end_process_group
from tests.torch.window.test_retry import narrow
from torch import nn

from gradscale import Dynamic, Policy
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.torch import LossScaler

POLICIES: list[Policy] = [Dynamic(), Headroom(), Histogram()]
EVENTS = ["clean", "bad loss", "overflow", "clean"]
STATUSES = ["applied", "nonfinite_loss", "overflow", "applied"]


def run(rank: int, policy: Policy) -> list[Any]:
    """Trains a data-parallel model; only rank 1 has the bad losses, only rank 0 the overflows."""
    model = nn.Linear(4, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(parallel, policy, agree="always")  # the overflows come after the reduction
    found: list[Any] = []
    for event in EVENTS:
        loss = parallel(torch.full((2, 4), 1.0 + rank)).square().mean()
        scaler.backward(loss * NAN if event == "bad loss" and rank == 1 else loss)
        if event == "overflow" and rank == 0:
            poison(model.weight, INF)
        result = scaler.step(optimizer, clip_norm=1.0)
        optimizer.zero_grad()
        found.append((str(result.status()), result.next_scale.item()))
    limit = scaler.loss_scale.item() / 16
    with parallel.no_sync():
        scaler.backward(narrow(parallel(torch.ones(2, 4)).mean(), limit if rank == 0 else INF), retries=20)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    result = scaler.step(optimizer)
    return [*found, str(result.status()), result.scale.item() / limit, result.retries, model.weight.tolist()]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save([run(rank, policy) for policy in POLICIES], f"{folder}/{rank}.pt")
    dist.barrier()
    end_process_group()


@pytest.mark.slow
def test_ranks_agree_on_every_step_scale_and_retry(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first == second
    for found in first:
        assert [status for status, _ in found[:4]] == STATUSES
        assert found[4] == "applied"
        assert found[5] <= 1.0
        assert found[6] > 0
