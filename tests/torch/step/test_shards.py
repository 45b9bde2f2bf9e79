"""Parameters in shards, as FSDP2 keeps them on two ranks, against the same training on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.torch.helpers import INF, OPTIMIZERS, loss_of, small_model
from tests.torch.process_group import end_process_group
from torch import nn

from gradscale import Dynamic, Policy
from gradscale.policies.headroom import Headroom
from gradscale.torch import LossScaler

CASES: list[tuple[str, Policy, float | None]] = [
    (name, policy, clip)
    for name in ("adamw fused", "adamw foreach", "sgd foreach")
    for policy in (Dynamic(), Headroom())
    for clip in (0.05, None)
]
STEPS = 4


def train(name: str, policy: Policy, clip: float | None, rank: int | None) -> list[Any]:
    """Returns the weights, norms, scales and culprits of a run in which the second step overflows on rank 0."""
    model: nn.Module = small_model()
    if rank is not None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = LossScaler(model, policy)
    found: list[Any] = []
    for step in range(STEPS):
        scaler.backward(loss_of(model, step))
        if step == 1 and rank in (None, 0):
            local(model[0].weight.grad)[0, 0] = INF  # type: ignore[index]
        result = scaler.step(optimizer, clip_norm=clip)
        norm = None if result.grad_norm is None or result.skipped() else result.grad_norm.item()
        found.append((str(result.status()), result.next_scale.item(), norm))
        optimizer.zero_grad()
    return [found, [full(parameter.detach()) for parameter in model.parameters()]]


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save([train(*case, rank) for case in CASES], f"{folder}/{rank}.pt")
    dist.barrier()
    end_process_group()


@pytest.mark.slow
def test_sharded_training_is_the_same_as_on_one_rank(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for case, one, other in zip(CASES, first, second, strict=True):
        expected = train(*case, None)
        assert one[0] == other[0], case
        assert [(status, scale) for status, scale, _ in one[0]] == [(status, scale) for status, scale, _ in expected[0]]
        norms = [[norm for _, _, norm in run[0] if norm is not None] for run in (one, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5), case
        torch.testing.assert_close(one[1], expected[1], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(other[1], one[1], rtol=0, atol=0)
