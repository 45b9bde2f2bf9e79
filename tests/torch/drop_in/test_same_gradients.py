"""Several optimizers on the gradients of one backward pass, with an `update` after each of them.

Lightning's manual optimization and Accelerate call it so. Tests on both scalers must fail on torch's, as in
`test_differences.py`.
"""

from typing import Any

import pytest
import torch
from tests.torch.drop_in.helpers import OURS, TORCH, give, grad_of, last_of, parameter, ready
from torch import nn

from gradscale import Dynamic, Policy
from gradscale.policies.headroom import Headroom

INF, NAN = torch.inf, torch.nan

HOW: dict[str, Any] = {
    "foreach": lambda params: torch.optim.SGD(params, lr=1.0, foreach=True),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
}


@pytest.fixture(params=[pytest.param(OURS, id="ours"), pytest.param(TORCH, id="torch", marks=pytest.mark.xfail)])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


class Pair:
    """Two optimizers with a parameter each, whose gradients are 1."""

    def __init__(self, scaler: Any, how: str = "foreach") -> None:
        self.scaler = scaler
        self.parameters = [parameter(), parameter()]
        self.optimizers = [HOW[how]([each]) for each in self.parameters]

    def backward(self, overflows: int | None = None, factor: float = 1.0) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scaler.scale(sum(each.sum() for each in self.parameters) * factor).backward()
        if overflows is not None:
            grad_of(self.parameters[overflows])[0] = INF

    def step_each(self, *, explicit: bool = False) -> None:
        for optimizer in self.optimizers:
            if explicit:
                self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)
            self.scaler.update()

    def values(self) -> list[float]:
        return [each.detach()[1].item() for each in self.parameters]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_second_optimizer_is_unscaled_by_the_scale_of_its_backward_pass_after_a_skip(
    how: str, explicit: bool, kind: Any
) -> None:
    pair = Pair(kind("cpu", init_scale=8.0), how)
    pair.backward(overflows=0)
    pair.step_each(explicit=explicit)
    assert pair.values() == [1.0, 0.0]
    assert pair.scaler.get_scale() == 4.0


@pytest.mark.parametrize("how", HOW)
def test_second_optimizer_is_unscaled_by_the_scale_of_its_backward_pass_after_growth(how: str, kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0, growth_interval=1), how)
    pair.backward()
    pair.step_each()
    assert pair.values() == [0.0, 0.0]
    assert pair.scaler.get_scale() == 16.0, "it grows once for one backward pass"


def test_overflow_of_the_second_optimizer_takes_back_the_growth_of_the_first(kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0, growth_interval=1))
    pair.backward(overflows=1)
    pair.step_each()
    assert pair.scaler.get_scale() == 4.0
    assert pair.scaler._get_growth_tracker() == 0


def test_overflow_of_both_optimizers_lowers_the_scale_once(kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0))
    pair.backward(factor=INF)
    pair.step_each()
    assert pair.scaler.get_scale() == 4.0


def test_updates_for_one_backward_pass_count_as_one_clean_step(kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0, growth_interval=2))
    for scale in (8.0, 16.0, 16.0, 32.0):
        pair.backward()
        pair.step_each()
        assert pair.scaler.get_scale() == scale


def test_optimizer_unscaled_before_the_update_of_another_is_not_divided_twice(kind: Any) -> None:
    """Accelerate unscales all optimizers before it clips."""
    pair = Pair(kind("cpu", init_scale=8.0))
    pair.backward()
    for optimizer in pair.optimizers:
        pair.scaler.unscale_(optimizer)
    for optimizer in pair.optimizers:
        pair.scaler.step(optimizer)
        pair.scaler.update()
    assert pair.values() == [0.0, 0.0]


def test_optimizer_unscaled_before_the_update_of_another_refuses_a_second_unscale(kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0))
    pair.backward()
    pair.scaler.unscale_(pair.optimizers[1])
    pair.scaler.step(pair.optimizers[0])
    pair.scaler.update()
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        pair.scaler.unscale_(pair.optimizers[1])


def test_scale_set_between_two_optimizers_is_that_of_the_next_backward_pass(kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0, growth_interval=1))
    pair.backward()
    pair.scaler.step(pair.optimizers[0])
    pair.scaler.update(64.0)
    pair.scaler.step(pair.optimizers[1])
    pair.scaler.update()
    assert pair.values() == [0.0, 0.0]
    assert pair.scaler.get_scale() == 128.0


@pytest.mark.parametrize("policy", [Dynamic(init_scale=8.0, growth_interval=1, hysteresis=2), Headroom()])
@pytest.mark.parametrize("overflows", [None, 0, 1])
def test_policy_sees_both_optimizers_as_one_step(overflows: int | None, policy: Policy) -> None:
    each, together = (Pair(OURS("cpu", policy=policy)) for _ in range(2))
    for pair in (each, together):
        pair.backward(overflows)
        give((pair.parameters[1], grad_of(pair.parameters[1]) * 3))
    each.step_each()
    for optimizer in together.optimizers:
        together.scaler.step(optimizer)
    together.scaler.update()
    assert each.values() == together.values()
    assert each.scaler.state_dict() == together.scaler.state_dict()
    assert each.scaler.metrics() == pytest.approx(together.scaler.metrics(), nan_ok=True)


def test_policy_sees_unscaled_gradients_where_the_scale_was_set_between_two_optimizers() -> None:
    peaks = []
    for new_scale in (None, 2.0**12):
        pair = Pair(OURS("cpu", policy=Headroom()))
        pair.backward()
        pair.scaler.step(pair.optimizers[0])
        if new_scale is not None:
            pair.scaler.update(new_scale)
        pair.scaler.step(pair.optimizers[1])
        pair.scaler.update()
        peaks.append(pair.scaler._rule.state.peak)
    assert peaks == [1.0, 1.0]


def test_counts_results_and_losses_are_those_of_one_step() -> None:
    pair = Pair(OURS("cpu", init_scale=8.0))
    pair.backward(factor=NAN)
    pair.scaler.step(pair.optimizers[0])
    first = last_of(pair.scaler)
    pair.scaler.update()
    pair.scaler.step(pair.optimizers[1])
    pair.scaler.update()
    assert [str(each.status()) for each in (first, last_of(pair.scaler))] == ["nonfinite_loss"] * 2
    assert [each.next_scale.item() for each in (first, last_of(pair.scaler))] == [4.0, 4.0]
    pair.backward()
    pair.step_each()
    assert (pair.scaler.metrics()["applied"], pair.scaler.metrics()["skipped"]) == (1.0, 1.0)
    assert str(last_of(pair.scaler).status()) == "applied"


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("overflows", [0, 1])
def test_optimizer_that_was_skipped_stands_for_the_step(overflows: int) -> None:
    pair = Pair(OURS("cpu", init_scale=8.0))
    pair.backward(overflows)
    pair.step_each()
    assert str(pair.scaler._memory.last.status()) == "overflow"


@pytest.mark.cpu_only("elsewhere the host does not know of it")
def test_skip_of_an_optimizer_that_is_stepped_without_the_scaler_stands_for_the_step() -> None:
    pair = Pair(OURS("cpu", init_scale=8.0))
    pair.backward(overflows=0)
    pair.scaler.unscale_(pair.optimizers[0])
    pair.scaler.update()
    pair.scaler.step(pair.optimizers[1])
    pair.scaler.update()
    assert str(last_of(pair.scaler).status()) == "applied"
    assert str(pair.scaler._memory.last.status()) == "overflow"


@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_gradients_set_by_hand_for_the_same_optimizer_are_those_of_the_present_scale(kind: Any) -> None:
    scaler, owner = ready(kind("cpu", init_scale=8.0)), parameter()
    optimizer = torch.optim.SGD([owner], lr=1.0)
    scales = []
    for value in (INF, 4.0, INF, 2.0):
        give((owner, value))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0, 2.0, 2.0]
    assert owner.tolist() == [-1.0] * 3


@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_scale_set_after_a_load_is_that_of_all_gradients(kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0))
    pair.backward()
    pair.scaler.load_state_dict(pair.scaler.state_dict())
    pair.scaler.update(16.0)
    pair.scaler.step(pair.optimizers[0])
    pair.scaler.update()
    assert pair.values() == [0.5, 1.0]
    assert pair.scaler.get_scale() == 16.0


@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_scale_written_by_other_code_between_two_updates_is_kept(kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0))
    pair.backward()
    pair.scaler.step(pair.optimizers[0])
    pair.scaler.update()
    pair.scaler._scale.fill_(64.0)
    pair.scaler.step(pair.optimizers[1])
    pair.scaler.update()
    assert pair.scaler.get_scale() == 64.0


@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_losses_of_two_backward_passes_are_two_steps(kind: Any) -> None:
    pair = Pair(kind("cpu", init_scale=8.0))
    for optimizer, owner in zip(pair.optimizers, pair.parameters, strict=True):
        pair.scaler.scale(owner.sum()).backward()
        grad_of(owner)[0] = INF
        pair.scaler.step(optimizer)
        pair.scaler.update()
    assert pair.scaler.get_scale() == 2.0


def test_modules_of_one_loss_train_the_same_with_one_update_or_with_two() -> None:
    results = []
    for each in (False, True):
        torch.manual_seed(0)
        modules = [nn.Linear(4, 4), nn.Linear(4, 1)]
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in modules]
        scaler = OURS("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(modules[1](modules[0](torch.ones(2, 4)).tanh()).square().mean()).backward()
            if step in (3, 6):
                grad_of(modules[0].weight)[0, 0] = INF
                grad_of(modules[1].weight)[0, 0] = INF
            for optimizer in optimizers:
                scaler.step(optimizer)
                if each:
                    scaler.update()
            if not each:
                scaler.update()
        results.append([*(p.tolist() for module in modules for p in module.parameters()), scaler.state_dict()])
    assert results[0] == results[1]
