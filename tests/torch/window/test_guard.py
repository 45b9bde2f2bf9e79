"""`guard`: schedulers and averages that are held, or advanced, when a step is skipped."""

import warnings
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, same, small_model, train_step, weights
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from gradscale import Dynamic
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")

SKIPPED = (0, 3, 4)


def setup(fused: bool = True) -> tuple[nn.Sequential, torch.optim.Optimizer, LossScaler]:
    model = small_model()
    return model, torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused), LossScaler(model, Dynamic())


def run(model: nn.Sequential, optimizer: torch.optim.Optimizer, scaler: LossScaler, guard: Any) -> list[bool]:
    advanced = []
    for number in range(6):
        train_step(scaler, model, optimizer, number, bad=INF if number in SKIPPED else None)
        advanced.append(guard.step())
    return advanced


@pytest.mark.parametrize("fused", [True, False])
def test_held_schedules_move_only_with_applied_steps(fused: bool) -> None:
    model, optimizer, scaler = setup(fused)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    advanced = run(model, optimizer, scaler, scaler.guard(schedule))
    assert advanced == [number not in SKIPPED for number in range(6)]
    assert schedule.get_last_lr() == [1 / (1 + 3)]


@pytest.mark.parametrize("fused", [True, False])
def test_advanced_schedules_move_with_every_step(fused: bool) -> None:
    model, optimizer, scaler = setup(fused)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert all(run(model, optimizer, scaler, scaler.guard(schedule, on_skip="advance")))
    assert schedule.get_last_lr() == [1 / (1 + 6)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("on_skip", ["hold", "advance"])
@pytest.mark.parametrize("make", [lambda o: LambdaLR(o, lambda _: 1.0), lambda o: OneCycleLR(o, 1.0, total_steps=9)])
def test_torch_does_not_warn_that_the_schedule_was_stepped_too_early(fused: bool, on_skip: Any, make: Any) -> None:
    model, optimizer, scaler = setup(fused)
    guard = scaler.guard(make(optimizer), on_skip=on_skip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, optimizer, scaler, guard)


@pytest.mark.parametrize("fused", [True, False])
def test_torch_does_not_warn_where_the_schedule_is_stepped_by_hand(fused: bool) -> None:
    model, optimizer, scaler = setup(fused)
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            train_step(scaler, model, optimizer, number, bad=INF if number == 0 else None)
            schedule.step()


def test_a_held_average_never_sees_a_skipped_step() -> None:
    model, optimizer, scaler = setup()
    average = AveragedModel(model)
    guard = scaler.guard(lambda: average.update_parameters(model))
    for number in range(3):
        train_step(scaler, model, optimizer, number, bad=INF if number == 1 else None)
        guard.step()
    assert average.n_averaged.item() == 2


def test_objects_with_an_update_are_updated() -> None:
    class Average:
        updates = 0

        def update(self) -> None:
            self.updates += 1

    average = Average()
    model, optimizer, scaler = setup()
    run(model, optimizer, scaler, scaler.guard(average))
    assert average.updates == 3


def test_several_objects_are_advanced_together() -> None:
    calls: list[str] = []
    model, optimizer, scaler = setup()
    guard = scaler.guard(lambda: calls.append("a"), lambda: calls.append("b"))
    train_step(scaler, model, optimizer)
    assert guard.step()
    assert calls == ["a", "b"]


def test_between_micro_batches_nothing_is_advanced_twice() -> None:
    calls: list[int] = []
    model, optimizer, scaler = setup()
    guard = scaler.guard(lambda: calls.append(1))
    train_step(scaler, model, optimizer)
    assert [guard.step() for _ in range(3)] == [True, False, False]
    train_step(scaler, model, optimizer, bad=INF)
    assert [guard.step() for _ in range(3)] == [False, False, False]
    assert calls == [1]


def test_a_guard_before_the_first_step_is_refused() -> None:
    _, optimizer, scaler = setup()
    guard = scaler.guard(LambdaLR(optimizer, lambda _: 1.0))
    with pytest.raises(RuntimeError, match=r"`guard\.step\(\)` follows `scaler\.step\(\.\.\.\)`"):
        guard.step()


@pytest.mark.parametrize("what", ["average", "plateau", "number"])
def test_what_cannot_be_called_without_arguments_is_refused(what: str) -> None:
    model, optimizer, scaler = setup()
    target = {"average": AveragedModel(model), "plateau": ReduceLROnPlateau(optimizer), "number": 3}[what]
    with pytest.raises(
        TypeError, match=rf"`guard` takes schedulers.*Received: {type(target).__name__}\. Pass a function"
    ):
        scaler.guard(target)


def test_an_unknown_way_to_skip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`on_skip` must be 'hold' or 'advance'\. Received: on_skip='wait'\."):
        LossScaler().guard(on_skip="wait")  # type: ignore[arg-type]


def test_a_guarded_run_equals_one_in_which_the_bad_batches_never_were() -> None:
    def trained(skips: bool) -> list[torch.Tensor]:
        model, optimizer, scaler = setup()
        guard = scaler.guard(LambdaLR(optimizer, lambda step: 1 / (1 + step)))
        for number in range(6):
            if skips or number not in SKIPPED:
                train_step(scaler, model, optimizer, number, bad=INF if number in SKIPPED else None)
                guard.step()
        return weights(model)

    assert same(trained(skips=True), trained(skips=False))
