"""Parameters that differ between ranks: stages, experts, separate models."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks
from tests.torch.versions import needs_sharding_on_cpu
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradscale import Dynamic
from gradscale.torch import LossScaler


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def norm_of(model: nn.Module, **ranks: Any) -> float | str:
    """Returns the norm of one step, or what is raised."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic(), **ranks)
    scaler.backward(model(torch.ones(2, 4)).square().mean())
    try:
        return scaler.step(optimizer, clip_norm=1.0).grad_norm.item()  # type: ignore[union-attr]
    except RuntimeError as error:
        return str(error)


class Experts(nn.Module):
    """A layer that every rank has, and one that differs, and may have no rows to work on."""

    def __init__(self, seed: int, *, idle: bool = False) -> None:
        super().__init__()
        self.shared, self.expert = linear(0), linear(seed)
        self.idle = idle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.idle:  # with rows of zeros, so that the mean is over as many as on the other rank
            return torch.cat([self.shared(x), torch.zeros(2, 4)])
        # So that the gradients of the shared layer do not depend on the expert: they are not reduced here.
        return torch.cat([self.shared(x), self.expert(x)])


def stage_of_shards() -> tuple[Any, Any]:
    """Returns one of two stages, each sharded over two ranks, and the group of ranks that have distinct stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    return fully_shard(linear(mesh.get_local_rank("stage")), mesh=mesh["shard"]), mesh["stage"].get_group()


def on_a_mesh_of_its_own() -> Any:
    """Returns a layer that is a DTensor on rank 0, in a mesh of this rank, and a plain tensor on the other."""
    groups: list[Any] = [dist.new_group([rank]) for rank in range(2)]
    layer = linear(dist.get_rank())
    mesh = DeviceMesh.from_group(groups[dist.get_rank()], "cpu")
    return fully_shard(layer, mesh=mesh) if dist.get_rank() == 0 else layer


def on_two_ranks() -> dict[str, float | str]:
    rank = dist.get_rank()
    experts, some = Experts(rank), Experts(rank, idle=rank == 1)
    return {
        "stages": norm_of(linear(rank), distinct=dist.group.WORLD),
        "experts": norm_of(experts, distinct={experts.expert: dist.group.WORLD}),
        "experts, one of them idle": norm_of(some, distinct={some.expert: dist.group.WORLD}),
        "experts, not named": norm_of(Experts(rank)),
        "stages, not named": norm_of(linear(rank)),
        "alone": norm_of(linear(rank), group="alone"),
        "the same": norm_of(linear(0)),
    }


def on_four_ranks() -> float | str:
    stage, group = stage_of_shards()
    return norm_of(stage, distinct=group)


def squares_of(model: nn.Module) -> dict[str, float]:
    """Returns the squared norms of the gradients, by the child that has them."""
    model(torch.ones(2, 4)).square().mean().backward()
    found: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        child = name.partition(".")[0] if isinstance(model, Experts) else ""
        found[child] = found.get(child, 0.0) + parameter.grad.double().square().sum().item()  # type: ignore[union-attr]
    return found


def norm_of_stages() -> float:
    return sum(squares_of(linear(seed))[""] for seed in range(2)) ** 0.5


def test_plain_tensors_that_differ_by_rank_are_counted_each_or_refused(tmp_path: Path) -> None:
    own = [squares_of(linear(seed))[""] ** 0.5 for seed in range(2)]
    parts = [squares_of(Experts(seed)) for seed in range(2)]
    experts = (parts[0]["shared"] + parts[0]["expert"] + parts[1]["expert"]) ** 0.5
    for rank, report in enumerate(run_ranks(2, on_two_ranks, folder=tmp_path)):
        assert report["stages"] == pytest.approx(norm_of_stages(), rel=1e-6)
        assert report["experts"] == pytest.approx(experts, rel=1e-6)
        busy = (parts[0]["shared"] + parts[0]["expert"]) ** 0.5
        assert report["experts, one of them idle"] == pytest.approx(busy, rel=1e-6)
        assert report["alone"] == pytest.approx(own[rank], rel=1e-6)
        assert report["the same"] == pytest.approx(own[0], rel=1e-6)
        for refused in ("stages, not named", "experts, not named"):
            assert "gradients that differ between ranks" in report[refused]


def norm_on_a_mesh() -> float | str:
    return norm_of(on_a_mesh_of_its_own(), distinct=dist.group.WORLD)


@needs_sharding_on_cpu
def test_a_mesh_that_another_rank_is_not_in_is_counted(tmp_path: Path) -> None:
    assert run_ranks(2, norm_on_a_mesh, folder=tmp_path) == [pytest.approx(norm_of_stages(), rel=1e-6)] * 2


@needs_sharding_on_cpu
def test_stages_of_shards_are_counted_each(tmp_path: Path) -> None:
    assert run_ranks(4, on_four_ranks, folder=tmp_path) == [pytest.approx(norm_of_stages(), rel=1e-6)] * 4
