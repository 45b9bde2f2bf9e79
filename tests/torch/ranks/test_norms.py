"""The norm of gradients that are spread over ranks, and bounds on their elements, against one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.ranks.gpt import GPT, ROUNDED, batch_of
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.layouts import LAYOUTS, sharded, tensor_parallel
from tests.torch.versions import needs_sharding_on_cpu
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gradscale import Dynamic, NoScaling, Policy
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.torch import LossScaler

POLICIES: list[Policy] = [Dynamic(), Headroom(), Histogram(), NoScaling()]
BOUND = 2.0**-10
STEPS = 2


def flat_shards(model: GPT) -> nn.Module:
    """FSDP1: plain tensors that are shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def replicas_of_tensor_parallel(model: GPT) -> nn.Module:
    """Two meshes of two ranks each, which hold the same: DTensors are replicated outside of their mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    return tensor_parallel(model, mesh["tensor"])


def two_meshes(model: GPT) -> nn.Module:
    """One block sharded over all ranks, the other over pairs and replicated; the rest are plain tensors."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.blocks["0"])
    fully_shard(model.blocks["1"], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model


OTHERS = {
    "FSDP1 on 2": (2, flat_shards),
    "TP on 2 of 4": (4, replicas_of_tensor_parallel),
    "FSDP2 on 4": (4, sharded),
    "two meshes": (4, two_meshes),
}
WHOLE_BATCH = {"TP on 2 of 4", "two meshes"}


def spread_as(name: str, model: GPT) -> tuple[nn.Module, int]:
    """Returns the model spread over ranks, and how many parts each batch is split into."""
    if name in OTHERS:
        ranks, spread = OTHERS[name]
        return spread(model), 1 if name in WHOLE_BATCH else ranks
    return LAYOUTS[name].spread(model), LAYOUTS[name].parts


def steps_of(name: str | None, policy: Policy) -> list[Any]:
    """Returns the norms of a few steps, the largest element of a gradient that was clipped, and the scale."""
    model, parts = GPT(ROUNDED), 1
    trained: nn.Module = model
    if name is not None:
        trained, parts = spread_as(name, model)
    rank = dist.get_rank() * parts // dist.get_world_size() if name is not None else 0
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    scaler = LossScaler(trained, policy)
    found: list[Any] = []
    for step in range(STEPS):
        inputs, targets = batch_of(step, rank, parts)
        scaler.backward(ROUNDED.loss(trained(inputs), targets))
        result = scaler.step(optimizer, clip_norm=1.0)
        found.append(result.grad_norm.item())  # type: ignore[union-attr]
        optimizer.zero_grad()
    inputs, targets = batch_of(STEPS, rank, parts)
    scaler.backward(ROUNDED.loss(trained(inputs), targets))
    scaler.step(optimizer, clip_value=BOUND)
    largest = max(float(local(parameter.grad).abs().max()) for parameter in held(trained))
    return [found, largest, scaler.loss_scale.item()]


def held(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.grad is not None and local(each.grad).numel()]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_ranks(names: list[str]) -> Mapping[str, list[Any]]:
    return {name: [steps_of(name, policy) for policy in POLICIES] for name in names}


@needs_sharding_on_cpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_norm_is_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    # Those of pipelines are in test_pipeline.py.
    names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks and layout.schedule is None]
    names += [name for name, (count, _) in OTHERS.items() if count == ranks]
    reports = run_ranks(ranks, on_ranks, names, folder=tmp_path)
    expected = [steps_of(None, policy) for policy in POLICIES]
    for name in names:
        for report in reports:
            for policy, found, one in zip(POLICIES, report[name], expected, strict=True):
                where = f"{name}, {policy}"
                assert found[0] == pytest.approx(one[0], rel=1e-6), where
                assert found[1] <= BOUND, where
                assert found[2] == one[2], where
        assert all(report[name][0][0] == reports[0][name][0][0] for report in reports), name
