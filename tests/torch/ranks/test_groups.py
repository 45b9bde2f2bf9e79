"""Groups that users name, checked when a scaler is built."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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
