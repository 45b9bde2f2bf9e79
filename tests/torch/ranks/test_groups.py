"""Groups that users name, checked when a scaler is built."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradscale import Dynamic, NoScaling
from gradscale.torch import GradScaler, LossScaler


@pytest.mark.parametrize("group", ["everyone", 3, [0, 1], nn.Linear(1, 1)])
@pytest.mark.parametrize("scaler", [LossScaler, partial(GradScaler, "cpu")], ids=["LossScaler", "GradScaler"])
def test_a_group_that_is_none_is_refused(scaler: Any, group: Any) -> None:
    with pytest.raises(TypeError, match='`group` must be a process group, None for every rank, or "alone"'):
        scaler(group=group)


@pytest.mark.parametrize("distinct", ["alone", [0, 1], {nn.Linear(1, 1): "stages"}])
def test_distinct_that_names_no_group_is_refused(distinct: Any) -> None:
    with pytest.raises(TypeError, match="`distinct` must be a process group, a mesh, or a mapping"):
        LossScaler(distinct=distinct)


def test_distinct_by_the_name_of_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match="Received: 'experts' as a key"):
        LossScaler(distinct={"experts": None})


def built() -> list[str]:
    """Returns what is raised on this rank for groups of rank 0."""
    group, mesh = dist.new_group([0]), DeviceMesh("cpu", [0])
    cases: list[dict[str, Any]] = [
        {"group": group},
        {"distinct": group},
        {"distinct": {nn.Linear(1, 1): group}},
        {"distinct": mesh},
    ]
    found: list[str] = []
    for arguments in cases:
        try:
            LossScaler(**arguments)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_group_of_other_ranks_is_refused(tmp_path: Path) -> None:
    member, other = run_ranks(2, built, folder=tmp_path)
    assert not member
    assert [text.partition(" must contain this rank")[0] for text in other] == ["`group`", *["`distinct`"] * 3]


def smaller() -> list[str]:
    """Returns what is raised for groups that are smaller than the mesh of a parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    own: Any = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=0.125)
    found: list[str] = []

    def note(step: Any) -> None:
        total: Any = parameter.square().sum()
        try:
            step(total.full_tensor())
        except ValueError as error:
            found.append(str(error))
        optimizer.zero_grad()

    for group in ("alone", own):
        for policy, norm in ((Dynamic(), False), (Dynamic(), True), (NoScaling(), True)):
            scaler = LossScaler(policy=policy, group=group)
            note(lambda loss, scaler=scaler, norm=norm: (scaler.backward(loss), scaler.step(optimizer, norm=norm)))
        drop_in = GradScaler("cpu", group=group)
        note(lambda loss, drop_in=drop_in: (drop_in.scale(loss).backward(), drop_in.step(optimizer)))
    return found


@pytest.mark.cpu_only("gloo")
def test_a_group_that_lacks_ranks_which_hold_shards_is_refused(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, smaller, folder=tmp_path)):
        text = f"Received: a group of ranks [{rank}], and a parameter that is also on ranks [{1 - rank}]"
        assert [text in each for each in found] == [True] * 8
