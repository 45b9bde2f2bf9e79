"""A loss that is not finite under the drop-in: a policy keeps its scale, and torch's own rule backs off as torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.drop_in.helpers import TORCH, HostReads, give, last_of, parameter
from tests.torch.helpers import INF, NAN
from torch import nn

from gradscale import Dynamic, Headroom, Histogram, LogMax, Policy, Static, Status
from gradscale.peers import preset
from gradscale.policies.scalars import EXACT
from gradscale.torch import GradScaler

POLICIES: dict[str, Policy] = {
    "headroom": Headroom(),
    "log max": LogMax(),
    "histogram": Histogram(),
    "dynamic": Dynamic(init_scale=2.0**14),
    "dynamic with hysteresis": Dynamic(hysteresis=2),
    "static": Static(1024.0),
}

pytestmark = pytest.mark.usefixtures("either_way")


def in_step(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)


def clipped(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer, clip_norm=1.0)


def unscaled(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def train(scaler: Any, owner: nn.Parameter, optimizer: Any, factor: float, step: Callable[..., None] = in_step) -> None:
    """Makes a step of which the loss is finite if `factor` is."""
    optimizer.zero_grad()
    scaler.scale((owner * factor).sum()).backward()
    step(scaler, optimizer)
    scaler.update()


@pytest.mark.parametrize("step", [in_step, clipped, unscaled])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_nan_losses_leave_the_scale_of_a_policy_as_it_is(
    policy: Policy, fused: bool, step: Callable[..., None]
) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.5, fused=fused)
    scaler = GradScaler("cpu", policy=policy)
    train(scaler, owner, optimizer, 1.0, step)
    scale, tracker, weights = scaler.get_scale(), scaler._get_growth_tracker(), owner.tolist()
    for _ in range(3):
        train(scaler, owner, optimizer, NAN, step)
        assert last_of(scaler).status() is Status.NONFINITE_LOSS
        assert (scaler.get_scale(), scaler._get_growth_tracker(), owner.tolist()) == (scale, tracker, weights)
        assert last_of(scaler).next_scale.item() == scale
    train(scaler, owner, optimizer, 1.0, step)
    assert last_of(scaler).status() is Status.APPLIED


@pytest.mark.parametrize("arguments", [{}, {"policy": preset("torch")}], ids=["numbers", "preset"])
def test_rule_of_torch_backs_off_as_torchs_scaler_does(arguments: dict[str, Any]) -> None:
    scales = []
    for scaler in (GradScaler("cpu", **arguments), TORCH("cpu")):
        owner = parameter()
        for _ in range(3):
            train(scaler, owner, torch.optim.SGD([owner], lr=0.5), NAN)
        scales.append(scaler.get_scale())
    assert scales == [2.0**13] * 2


@pytest.mark.parametrize(
    "policy", [Dynamic(init_scale=8.0, growth_interval=1), Headroom()], ids=["dynamic", "headroom"]
)
def test_finite_gradients_of_such_a_loss_are_applied_as_in_torch_and_keep_the_scale(policy: Policy) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.5)
    scaler = GradScaler("cpu", policy=policy)
    before = scaler.get_scale()
    scaler.scale(owner.sum() + INF).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (owner.tolist(), scaler.get_scale()) == ([0.5] * 3, before)


@pytest.mark.parametrize("updates", [1, 2], ids=["one update", "merged updates"])
def test_one_bad_loss_of_several_optimizers_keeps_the_scale(updates: int) -> None:
    owners = [parameter(), parameter()]
    optimizers = [torch.optim.SGD([owner], lr=0.5) for owner in owners]
    scaler = GradScaler("cpu", policy=Dynamic(init_scale=8.0, growth_interval=1))
    for loss in scaler.scale([owners[0].sum(), (owners[1] * NAN).sum()]):
        loss.backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        if updates == 2:
            scaler.update()
    if updates == 1:
        scaler.update()
    assert scaler.get_scale() == 8.0
    assert [owner.tolist() for owner in owners] == [[0.5] * 3, [1.0] * 3]


def test_overflow_after_a_bad_loss_lowers_the_scale_again() -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.5)
    scaler = GradScaler("cpu", policy=Dynamic(init_scale=8.0))
    train(scaler, owner, optimizer, NAN)
    scaler.scale(owner.sum()).backward()
    give((owner, INF))
    scaler.step(optimizer)
    scaler.update()
    assert (last_of(scaler).status(), scaler.get_scale()) == (Status.OVERFLOW, 4.0)


def test_policy_saved_and_loaded_keeps_its_scale_as_well() -> None:
    scaler, loaded = GradScaler("cpu", policy=Dynamic(init_scale=8.0)), GradScaler("cpu")
    loaded.load_state_dict(scaler.state_dict())
    owner = parameter()
    train(loaded, owner, torch.optim.SGD([owner], lr=0.5), NAN)
    assert loaded.get_scale() == 8.0


@pytest.mark.skipif(not EXACT, reason="with numpy 1 the rule runs on tensors, whose reads on a CPU are counted")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_bad_loss_of_a_fused_step_is_not_read_by_the_host(policy: Policy) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.5, fused=True)
    scaler = GradScaler("cpu", policy=policy)
    train(scaler, owner, optimizer, 1.0)
    with HostReads() as reads:
        train(scaler, owner, optimizer, NAN)
    assert reads.count == 0
