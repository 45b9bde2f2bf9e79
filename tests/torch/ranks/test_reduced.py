"""Under DDP: where the reduced gradients tell every rank all it must know, and a clean step sends nothing."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import small_model
from tests.torch.process_group import end_process_group
from torch import nn

from gradscale.torch.ranks.ddp import Reduced


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.parallel.DistributedDataParallel]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield nn.parallel.DistributedDataParallel(small_model())
    end_process_group()


def test_ddp_around_the_model_reduces_the_gradients_of_its_optimizers(
    wrapped: nn.parallel.DistributedDataParallel,
) -> None:
    assert Reduced([wrapped]).holds_for([torch.optim.SGD(wrapped.parameters(), lr=0.1)], None)
