"""`scaler.last`: the result of a step of the drop-in."""

from typing import Any

import pytest
import torch
from tests.torch.drop_in.helpers import give, last_of, parameter, ready

from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status
from gradscale.torch import GradScaler

INF, NAN = torch.inf, torch.nan


def test_there_is_no_result_before_the_first_step() -> None:
    assert GradScaler("cpu").last is None


def test_disabled_scaler_has_no_result() -> None:
    owner = parameter()
    give((owner, 1.0))
    scaler = GradScaler("cpu", enabled=False)
    scaler.step(torch.optim.SGD([owner], lr=0.1))
    assert scaler.last is None


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_applied_step_says_so_with_its_scale_and_the_next(fused: bool, explicit: bool) -> None:
    owner = parameter()
    optimizer = torch.optim.AdamW([owner], fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=8.0, growth_interval=1))
    give((owner, 1.0))
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    result = last_of(scaler)
    assert result.next_scale.item() == 8.0
    scaler.update()
    assert (result.applied.item(), result.scale.item(), result.next_scale.item()) == (True, 8.0, 16.0)
    assert (result.skipped(), result.poll(), result.status(), result.culprits()) == (False, True, Status.APPLIED, [])


@pytest.mark.cpu_only("a fused step on a device counts nothing, and measures nothing after `unscale_`")
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_skipped_step_names_its_culprits_even_after_the_gradients_are_gone(fused: bool, explicit: bool) -> None:
    owners = [parameter() for _ in range(3)]
    named = [(f"layer{index}", owner) for index, owner in enumerate(owners)]
    optimizer = torch.optim.AdamW(named, fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((owners[0], 1.0), (owners[1], torch.tensor([1.0, INF, INF])), (owners[2], torch.tensor([NAN, 1.0, INF])))
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    result = last_of(scaler)
    assert (result.skipped(), result.status(), result.next_scale.item()) == (True, Status.OVERFLOW, 4.0)
    assert result.culprits() == [Culprit("layer1", "inf", 2), Culprit("layer2", "nan", 2)]
    optimizer.zero_grad()
    assert result.culprits() == [Culprit("layer1", "inf", 2), Culprit("layer2", "nan", 2)]


def test_result_is_of_the_last_of_several_optimizers() -> None:
    good, bad = parameter(), parameter()
    scaler = ready(GradScaler("cpu"))
    give((good, 1.0), (bad, INF))
    scaler.step(torch.optim.SGD([bad], lr=0.1))
    first = last_of(scaler)
    scaler.step(torch.optim.SGD([good], lr=0.1))
    scaler.update()
    assert (first.skipped(), last_of(scaler).skipped()) == (True, False)


def test_skip_of_a_fused_optimizer_is_reported() -> None:
    """Trainers that watch whether `optimizer.step` was called cannot see it on a device: a fused one is called."""
    owner = parameter()
    optimizer = torch.optim.AdamW([owner], fused=True)
    scaler = ready(GradScaler("cpu"))
    give((owner, INF))
    scaler.step(optimizer)
    assert last_of(scaler).skipped()
    assert optimizer.state[owner].get("step", 0) == 0


def test_gradient_that_only_overflows_once_divided_has_no_culprit_in_a_fused_step() -> None:
    """The kernel never made it infinite, so there is nothing to point at; the step is skipped all the same."""
    owner = parameter()
    scaler = ready(GradScaler("cpu", init_scale=2.0**-20))
    give((owner, 1e35))
    scaler.step(torch.optim.SGD([owner], lr=0.1, fused=True))
    assert (last_of(scaler).skipped(), last_of(scaler).culprits()) == (True, [])


def test_fused_optimizer_without_gradients_says_so() -> None:
    scaler = ready(GradScaler("cpu"))
    scaler.step(torch.optim.SGD([parameter()], lr=0.1, fused=True))
    assert last_of(scaler).status() is Status.NO_GRADS


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_optimizer_that_takes_the_scaler_leaves_no_result() -> None:
    class Takes(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None: ...

    owner, other = parameter(), parameter()
    scaler = ready(GradScaler("cpu"))
    give((owner, 1.0), (other, 1.0))
    scaler.step(torch.optim.SGD([owner], lr=0.1))
    scaler.step(Takes([other], lr=0.1))
    assert scaler.last is None


def test_earlier_results_keep_their_scales() -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    results = []
    for _ in range(3):
        give((owner, INF))
        scaler.step(optimizer)
        scaler.update()
        results.append(last_of(scaler))
    assert [(result.scale.item(), result.next_scale.item()) for result in results] == [(8, 4), (4, 2), (2, 1)]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("policy", [None, "auto"])
def test_what_is_written_to_a_result_changes_no_other(policy: str | None) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(GradScaler("cpu", policy=policy))
    results = []
    for _ in range(4):
        give((owner, 64.0))
        scaler.step(optimizer)
        scaler.update()
        results.append(last_of(scaler))
    before = [(result.scale.item(), result.next_scale.item()) for result in results]
    results[-1].scale.log2_()
    after = [(result.scale.item(), result.next_scale.item()) for result in results]
    assert after == [*before[:-1], (results[-1].scale.item(), before[-1][1])]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("policy", [None, "auto"])
def test_what_is_written_to_a_result_changes_no_later_step(policy: str | None) -> None:
    owners = [parameter(), parameter()]
    scaler = GradScaler("cpu", policy=policy)
    scaler.scale(sum(owner.sum() for owner in owners)).backward()
    for owner in owners:
        scaler.step(torch.optim.SGD([owner], lr=0.5))
        scaler.update()
        last_of(scaler).scale.zero_()
    assert [owner.tolist() for owner in owners] == [[0.5] * 3] * 2
