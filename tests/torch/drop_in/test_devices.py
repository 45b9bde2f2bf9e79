"""Several devices in one process, emulated: the flags of each are one decision."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.torch.drop_in.helpers import give, grad_of, last_of, parameter, ready
from torch import Tensor

from gradscale import Headroom
from gradscale.engine.culprits import Culprit
from gradscale.policies.contract import Seen
from gradscale.torch import GradScaler, host

FIRST, SECOND = torch.empty(0).device, torch.device("cpu", 1)


class TwoDevices(GradScaler):
    """Believes that every optimizer also has gradients on a second device, whose flag is `second`."""

    second = 0.0

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(*args) | {SECOND: torch.tensor(self.second)}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "skipped"),
    [(1.0, 0.0, False), (torch.inf, 0.0, True), (1.0, 1.0, True), (torch.inf, 1.0, True)],
)
def test_overflow_on_any_device_skips_the_step_and_lowers_the_scale_once(
    first: float, second: float, skipped: bool, fused: bool
) -> None:
    owner = parameter()
    optimizer = torch.optim.Adam([owner], lr=0.1, fused=fused)
    scaler = ready(TwoDevices("cpu", init_scale=8.0))
    scaler.second = second
    give((owner, first))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(owner.detach(), torch.ones(3)) is skipped
    assert scaler.last.skipped() is skipped
    assert scaler.get_scale() == (4.0 if skipped else 8.0)
    if fused:
        assert optimizer.state[owner].get("step", 0) == (0 if skipped else 1)


@pytest.mark.parametrize("flag", [2.0, torch.nan, -1.0])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_fused_kernels_are_given_one_or_zero_and_nothing_else(flag: float, shape: tuple[int, ...]) -> None:
    owner = parameter()
    optimizer = torch.optim.Adam([owner], lr=0.1, fused=True)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((owner, 1.0))
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {FIRST: torch.full(shape, flag)}
    scaler.step(optimizer)
    scaler.update()
    assert owner.tolist() == [1.0] * 3
    assert scaler.get_scale() == 4.0


def test_update_leaves_the_flags_of_the_optimizers_as_they_are() -> None:
    owners = [parameter(), parameter()]
    scaler = ready(GradScaler("cpu"))
    give((owners[0], 1.0), (owners[1], torch.inf))
    optimizers = [torch.optim.SGD([owner], lr=0.1) for owner in owners]
    for optimizer in optimizers:
        scaler.step(optimizer)
    flags = [scaler._found_inf_per_device(optimizer)[FIRST] for optimizer in optimizers]
    scaler.update()
    assert [flag.item() for flag in flags] == [0.0, 1.0]


def test_flags_are_noted_for_every_device_that_holds_gradients() -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1, fused=True)
    scaler = ready(GradScaler("cpu"))
    give((owner, torch.inf))
    noted = scaler._check_inf_per_device(optimizer)
    assert {device: flag.item() for device, flag in noted.items()} == {FIRST: 1.0}
    assert scaler._found_inf_per_device(optimizer) is noted
    assert grad_of(owner).tolist() == [torch.inf] * 3


@pytest.fixture
def _as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the check take the CPU for an accelerator, whose outcome it may not look at."""
    monkeypatch.setattr(host, "in_host_memory", lambda _: False)


@pytest.mark.usefixtures("_as_on_an_accelerator")
@pytest.mark.parametrize(("grad", "skipped"), [(1.0, False), (torch.inf, True), (torch.nan, True), (1e30, False)])
def test_fused_step_on_an_accelerator_is_gated_by_the_largest_gradient(grad: float, skipped: bool) -> None:
    owner, other = parameter(), parameter()
    optimizer = torch.optim.SGD([("good", other), ("bad", owner)], lr=0.1, fused=True)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((other, 1.0), (owner, grad))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(owner.detach(), torch.ones(3)) is skipped
    assert [culprit.name for culprit in scaler.last.culprits()] == (["bad"] if skipped else [])


@pytest.mark.usefixtures("_as_on_an_accelerator")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_finite_gradient_whose_square_overflows_is_clipped_by_no_norm(fused: bool, clip_norm: float | None) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([("large", owner)], lr=0.1, fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((owner, 1e30))
    scaler.step(optimizer, clip_norm=clip_norm)
    # Nothing can be clipped by an infinite norm: no element of it counts as one that is not finite.
    assert last_of(scaler).culprits() == ([] if clip_norm is None else [Culprit("large", "inf", None)])


@pytest.mark.usefixtures("_as_on_an_accelerator")
def test_policy_on_an_accelerator_is_shown_the_largest_gradient_and_no_norm() -> None:
    owner = parameter(shape=(100,))
    optimizer = torch.optim.SGD([owner], lr=0.0, fused=True)
    policy = Headroom()
    scaler = ready(GradScaler("cpu", policy=policy))
    state = policy.start()
    for _ in range(20):
        give((owner, 0.25 * scaler.get_scale()))
        scaler.step(optimizer)
        scaler.update()
        state = policy.next(state, Seen(amax=np.float32(0.25)), np)
        assert scaler.get_scale() == float(state.scale)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_overflow_that_a_subclass_has_found_survives_a_bound_on_the_norm(early: bool, fused: bool) -> None:
    owner = parameter()
    optimizer = torch.optim.Adam([owner], lr=0.1, fused=fused)
    scaler = ready(TwoDevices("cpu", init_scale=8.0))
    scaler.second = 1.0
    give((owner, 1.0))
    if early:
        scaler.unscale_and_clip_(optimizer, 1.0)
    scaler.step(optimizer, clip_norm=1.0)
    scaler.update()
    assert owner.tolist() == [1.0] * 3
    assert last_of(scaler).skipped()
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_flag_that_other_code_writes_to_skips_the_step_and_lowers_the_scale(fused: bool) -> None:
    """As an all-reduce of the flags does, in the `unscale_` of a subclass."""
    owner = parameter()
    optimizer = torch.optim.Adam([owner], lr=0.1, fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((owner, 1.0))
    scaler.unscale_(optimizer)
    scaler._found_inf_per_device(optimizer)[FIRST].fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert owner.tolist() == [1.0] * 3
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("fused", [False, True])
def test_flag_that_other_code_clears_lets_the_step_be_made(fused: bool, kind: Any) -> None:
    """As code that has repaired the gradients does."""
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=1.0, fused=fused)
    scaler = ready(kind("cpu", init_scale=8.0))
    give((owner, torch.inf))
    scaler.unscale_(optimizer)
    give((owner, 1.0))
    scaler._found_inf_per_device(optimizer)[FIRST].zero_()
    scaler.step(optimizer)
    scaler.update()
    assert owner.tolist() == [0.0] * 3
    assert scaler.get_scale() == 8.0


@pytest.mark.usefixtures("_as_on_an_accelerator")
def test_losses_that_follow_a_step_on_an_accelerator_are_those_of_the_next() -> None:
    """As in a loop of a discriminator and a generator, with one `update` for both."""
    owners = [parameter(), parameter()]
    optimizers = [torch.optim.SGD([owner], lr=1.0, fused=True) for owner in owners]
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for owner, optimizer in zip(owners, optimizers, strict=True):
        scaler.scale(owner.sum()).backward()
        scaler.step(optimizer)
    scaler.update()
    assert [owner.tolist() for owner in owners] == [[0.0] * 3] * 2
    assert scaler.get_scale() == 16.0


@pytest.mark.usefixtures("_as_on_an_accelerator")
def test_result_of_a_fused_step_whose_norm_overflows_after_unscale_is_skipped() -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1, fused=True)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((owner, 1e30))
    scaler.unscale_(optimizer)
    scaler.step(optimizer, clip_norm=1.0)
    assert owner.tolist() == [1.0] * 3
    assert last_of(scaler).skipped()
