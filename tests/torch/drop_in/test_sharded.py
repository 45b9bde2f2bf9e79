"""Parameters that are distributed tensors, as FSDP2 makes them, on a mesh of one rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.drop_in.helpers import OURS, TORCH, grad_of, last_of
from tests.torch.process_group import end_process_group
from tests.torch.versions import WRITES_SHARDS_BACK
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

tensor_module = pytest.importorskip("torch.distributed.tensor")

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not have:UserWarning")  # of torch 2.6


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield init_device_mesh("cpu", (1,))
    end_process_group()


def sharded_parameter(mesh: Any) -> nn.Parameter:
    return nn.Parameter(tensor_module.distribute_tensor(torch.ones(4, 4), mesh, [tensor_module.Shard(0)]))


def backward(scaler: Any, owner: Any, *, bad: bool) -> None:
    scaler.scale((owner * 1.0).sum().full_tensor()).backward()
    if bad:
        grad_of(owner).to_local()[0, 0] = torch.inf  # type: ignore[attr-defined]


@pytest.mark.cpu_only("gloo, which has no other device")
@pytest.mark.parametrize("kind", [OURS, TORCH])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}])
def test_sharded_gradients_are_checked_and_divided(how: Any, explicit: bool, bad: bool, kind: Any, mesh: Any) -> None:
    owner = sharded_parameter(mesh)
    optimizer = torch.optim.AdamW([owner], lr=0.5, weight_decay=0.0, **how)
    scaler = kind("cpu", init_scale=8.0)
    backward(scaler, owner, bad=bad)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    expected = torch.full((4, 4), 1.0 if bad else 0.5)
    torch.testing.assert_close(owner.full_tensor().detach(), expected)  # type: ignore[attr-defined]
    if not bad:
        average = optimizer.state[owner]["exp_avg"].full_tensor()
        torch.testing.assert_close(average, torch.full((4, 4), 0.1))  # of the unscaled gradient, whose weight is 0.1
        written = explicit or "fused" not in how or WRITES_SHARDS_BACK
        assert grad_of(owner).full_tensor().unique().item() in ((1.0,) if written else (1.0, 8.0))  # type: ignore[attr-defined]
    assert scaler.get_scale() == (4.0 if bad else 8.0)


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}])
def test_culprits_are_counted_in_the_shard_of_this_rank(how: Any, mesh: Any) -> None:
    owner = sharded_parameter(mesh)
    optimizer = torch.optim.AdamW([("weight", owner)], **how)
    scaler = OURS("cpu", init_scale=8.0)
    backward(scaler, owner, bad=True)
    scaler.step(optimizer)
    assert [(culprit.name, culprit.kind, culprit.count) for culprit in last_of(scaler).culprits()] == [
        ("weight", "inf", 1)
    ]
