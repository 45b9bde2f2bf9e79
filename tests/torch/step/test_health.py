"""`LossScaler.health`: what a real run is found to be."""

import copy

import pytest
import torch
from tests.torch.helpers import autocast, batch, small_model, train_step
from torch import nn

from gradscale import CheckOnly, Dynamic, NoScaling, Static
from gradscale.engine.health import Condition
from gradscale.torch import LossScaler


def run(scaler: LossScaler, model: nn.Module, steps: int, bad: float | None = None, lr: float = 1e-3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        train_step(scaler, model, optimizer, bad=bad)


@pytest.mark.usefixtures("either_way")
def test_a_run_that_learns_is_ok() -> None:
    model = small_model()
    scaler = LossScaler(model)
    assert scaler.health().condition is Condition.OK
    run(scaler, model, 30)
    health = scaler.health()
    assert health.condition is Condition.OK
    assert (health.applied, health.steps) == (30, 30)


@pytest.mark.usefixtures("either_way")
def test_skips_at_the_start_are_calibration_and_later_thrashing() -> None:
    model = small_model()
    scaler = LossScaler(model, Dynamic())
    run(scaler, model, 1, bad=float("inf"))
    assert scaler.health().condition is Condition.CALIBRATING
    for _ in range(8):
        run(scaler, model, 4)
        run(scaler, model, 1, bad=float("inf"))
    run(scaler, model, 1)
    assert scaler.health().condition is Condition.THRASHING
    run(scaler, model, 30)
    assert scaler.health().condition is Condition.OK  # since the last look


@pytest.mark.usefixtures("either_way")
def test_overflows_at_the_floor_are_stuck_with_the_parameter() -> None:
    model = small_model()
    scaler = LossScaler(model, Dynamic(init_scale=1.0), on_stuck="ignore")
    run(scaler, model, 5, bad=float("inf"))
    health = scaler.health()
    assert health.condition is Condition.STUCK
    assert "'0.weight'" in health.advice
    assert health.evidence["culprits"] == "0.weight (inf)"


def test_bf16_needs_no_scale() -> None:
    model = small_model()
    scaler = LossScaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with autocast(torch.bfloat16):
        scaler.backward(model(batch()[0]).float().square().mean())
    scaler.step(optimizer)
    assert scaler.health().condition is Condition.UNNEEDED


def test_a_check_in_bf16_is_not_scaling() -> None:
    model = small_model()
    scaler = LossScaler(model, CheckOnly())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with autocast(torch.bfloat16):
        scaler.backward(model(batch()[0]).float().square().mean())
    scaler.step(optimizer)
    assert str(scaler.health()) == "ok: 1 update in 1 step. Nothing to do."


def test_without_scaling_there_is_nothing_to_say() -> None:
    model = small_model()
    scaler = LossScaler(model, NoScaling())
    run(scaler, model, 2)
    assert scaler.health().condition is Condition.OK


def test_a_look_changes_nothing() -> None:
    model = small_model()
    scaler = LossScaler(model, Static(1024.0))
    run(scaler, model, 3)
    state, saved = copy.deepcopy(model.state_dict()), scaler.state_dict()
    scaler.health()
    assert scaler.state_dict() == saved
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_copy_of_a_scaler_has_no_memory_of_the_original() -> None:
    model = small_model()
    scaler = LossScaler(model)
    run(scaler, model, 3)
    assert copy.deepcopy(scaler).health().advice == "No step was taken yet."
