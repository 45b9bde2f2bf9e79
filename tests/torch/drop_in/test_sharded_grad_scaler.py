"""`ShardedGradScaler` on one process: its arguments, its state, and training as with torch's class."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.drop_in.helpers import everything, give, grad_of, parameter, ready, saved_by, train
from tests.torch.process_group import end_process_group

from gradscale.torch import GradScaler, ShardedGradScaler

torch_class = pytest.importorskip("torch.distributed.fsdp.sharded_grad_scaler").ShardedGradScaler

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    end_process_group()


def test_arguments_are_torchs_in_torchs_order() -> None:
    theirs = inspect.signature(torch_class).parameters
    ours = list(inspect.signature(ShardedGradScaler).parameters.values())
    assert [(each.name, each.default) for each in ours[: len(theirs)]] == [
        (each.name, each.default) for each in theirs.values()
    ]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in ours[len(theirs) :])
    scaler = ShardedGradScaler("cpu", 8.0, 0.25, 4.0, 10)
    assert isinstance(scaler, GradScaler)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.25, 4.0)


def test_states_are_loaded_by_either_class() -> None:
    numbers = {"init_scale": 8.0, "backoff_factor": 0.25, "growth_factor": 4.0, "growth_interval": 10}
    ours, theirs = ShardedGradScaler("cpu", **numbers), torch_class("cpu", **numbers)
    assert saved_by(ours) == theirs.state_dict()
    for source, target in ((ours, torch_class("cpu")), (theirs, ShardedGradScaler("cpu"))):
        target.load_state_dict(source.state_dict())
        assert saved_by(target) == saved_by(source)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("clip", [False, True])
def test_training_is_the_same_as_with_torchs_class(clip: bool) -> None:
    def run(kind: Any) -> Any:
        scaler = kind("cpu", init_scale=2.0**10, growth_interval=2)
        model, optimizer, scales = train(scaler, lambda p: torch.optim.AdamW(p, lr=0.1), bad_step=3, clip=clip)
        return [each.tolist() for each in everything(model, optimizer)], scales

    assert run(ShardedGradScaler) == run(torch_class)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("kind", [ShardedGradScaler, torch_class])
def test_fp16_gradients_are_unscaled(kind: Any) -> None:
    owner = parameter(dtype=torch.float16)
    optimizer = torch.optim.SGD([owner], lr=1.0)
    scaler = ready(kind("cpu", init_scale=8.0))
    give((owner, 8.0))
    scaler.unscale_(optimizer)
    assert grad_of(owner).tolist() == [1.0] * 3
    scaler.step(optimizer)
    assert owner.tolist() == [0.0] * 3


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("kind", [ShardedGradScaler, pytest.param(torch_class, marks=pytest.mark.xfail)])
def test_fused_optimizer_is_stepped_after_an_explicit_unscale(kind: Any) -> None:
    scaler, owner = ready(kind("cpu", init_scale=8.0)), parameter()
    optimizer = torch.optim.AdamW([owner], lr=1.0, weight_decay=0.0, fused=True)
    give((owner, 8.0))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(owner.detach(), torch.zeros(3))


def test_disabled_it_does_nothing() -> None:
    scaler = ShardedGradScaler("cpu", enabled=False)
    assert repr(scaler) == "ShardedGradScaler(enabled=False)"
    assert (scaler.state_dict(), hasattr(scaler, "process_group")) == ({}, False)
