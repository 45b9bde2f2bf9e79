"""Two processes that train FP16 weights with masters, data-parallel."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.torch.process_group import end_process_group
from torch import nn

from gradscale import Dynamic
from gradscale.torch import LossScaler, MasterWeights


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = nn.Linear(4, 2).half()
    optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), fused=True))
    # Built afterwards, so that rank 1's masters are of weights that rank 0's have replaced since.
    parallel = nn.parallel.DistributedDataParallel(model)
    scaler = LossScaler(parallel, Dynamic(init_scale=1024.0), agree="always")  # the inf comes after the reduction
    skipped = []
    for step in range(4):
        loss = parallel(torch.full((2, 4), 1.0 + rank).half()).float().square().mean()
        scaler.backward(loss)
        if step == 2 and rank == 1:
            next(model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
        skipped.append(scaler.step(optimizer, clip_norm=1.0).skipped())
        optimizer.zero_grad()
    torch.save((skipped, [value.detach() for _, value in optimizer.masters()]), f"{folder}/{rank}.pt")
    dist.barrier()
    end_process_group()


@pytest.mark.slow
def test_ranks_have_the_same_masters(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    (skipped, masters), (other_skipped, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert skipped == other_skipped == [False, False, True, False]
    assert all(torch.equal(one, other) for one, other in zip(masters, others, strict=True))
