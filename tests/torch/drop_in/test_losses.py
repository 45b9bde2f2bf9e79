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


@pytest.mark.parametrize("arguments", [{}, {"policy": preset("torch", growth_interval=2)}], ids=["numbers", "preset"])
@pytest.mark.parametrize("loss", [INF, NAN])
def test_rule_of_torch_does_not_see_a_loss_whose_gradients_are_finite(arguments: dict[str, Any], loss: float) -> None:
    found = []
    for scaler in (GradScaler("cpu", **(arguments or {"growth_interval": 2})), TORCH("cpu", growth_interval=2)):
        owner = parameter()
        optimizer = torch.optim.SGD([owner], lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(owner.sum() + loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((scaler.get_scale(), scaler._get_growth_tracker(), owner.tolist()))
    assert found[0] == found[1] == (2.0**17, 1, [-0.5] * 3)


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


@pytest.mark.parametrize("policy", [None, "auto", "dynamic"])
def test_steps_that_are_applied_beside_such_a_loss_are_not_counted_as_skipped(policy: str | None) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.5)
    scaler = GradScaler("cpu", policy=policy, max_consecutive_skips=2, on_stuck="raise")
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(owner.sum() + INF).backward()
        scaler.step(optimizer)
        scaler.update()
    counts = scaler.metrics()
    assert (counts["applied"], counts["skipped"], owner.tolist()) == (4, 0, [-1.0] * 3)


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


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_bad_loss_of_a_fused_step_is_not_read_by_the_host(policy: Policy) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.5, fused=True)
    scaler = GradScaler("cpu", policy=policy)
    train(scaler, owner, optimizer, 1.0)
    with HostReads() as reads:
        train(scaler, owner, optimizer, NAN)
    assert reads.count == 0


@pytest.mark.parametrize("fused", [True, False])
def test_each_of_two_optimizers_may_be_stepped_after_a_loss_of_its_own_before_one_update(fused: bool) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([each], lr=0.5, fused=fused) for each in weights]
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for _ in range(2):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
        scaler.update()
    assert [each.tolist() for each in weights] == [[0.0, 0.0]] * 2
    assert scaler.get_scale() == 16.0
