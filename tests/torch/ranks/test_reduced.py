"""Under DDP: where the reduced gradients tell every rank all it must know, and a clean step sends nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import small_model
from tests.torch.process_group import end_process_group
from torch import nn

from gradscale.torch.ranks.reduced import Reduced

HOST, DEVICE = torch.device("cpu"), torch.device("meta")


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.parallel.DistributedDataParallel]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield nn.parallel.DistributedDataParallel(small_model())
    end_process_group()


@pytest.mark.parametrize(
    ("how", "where", "sends_nothing"),
    [
        ({"foreach": True}, HOST, True),
        ({"fused": True}, HOST, True),
        ({"foreach": True}, DEVICE, True),
        ({"fused": True}, DEVICE, False),
    ],
    ids=["host", "fused, host", "device", "fused, device"],
)
def test_only_a_fused_optimizer_on_a_device_needs_a_round_at_a_clean_step(
    how: dict[str, Any], where: torch.device, sends_nothing: bool, wrapped: nn.parallel.DistributedDataParallel
) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, **how)
    assert Reduced([wrapped]).holds_for([optimizer], where, None) is sends_nothing
