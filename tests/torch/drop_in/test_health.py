"""`GradScaler.health`: as that of `LossScaler`, from what the drop-in knows."""

import math

import torch
from tests.torch.drop_in.helpers import parameter
from tests.torch.helpers import loss_of, poison, small_model

from gradscale import CheckOnly
from gradscale.engine.health import Condition
from gradscale.torch import GradScaler


def run(scaler: GradScaler, model: torch.nn.Module, steps: int, bad: float | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        scaler.scale(loss_of(model)).backward()
        if bad is not None:
            poison(next(model.parameters()), bad)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_a_run_that_applies_its_steps_is_ok() -> None:
    model, scaler = small_model(), GradScaler(torch.get_default_device().type)
    run(scaler, model, 25)
    health = scaler.health()
    assert (health.condition, health.applied, health.steps) == (Condition.OK, 25, 25)


def test_overflows_at_the_floor_are_stuck_with_the_parameter() -> None:
    model, scaler = small_model(), GradScaler(torch.get_default_device().type, init_scale=1.0, on_stuck="ignore")
    run(scaler, model, 5, bad=math.inf)
    health = scaler.health()
    assert health.condition is Condition.STUCK
    assert health.evidence["culprits"] == "param_groups[0].params[0] (inf)"


def test_a_disabled_one_has_nothing_to_say() -> None:
    model, scaler = small_model(), GradScaler(torch.get_default_device().type, enabled=False)
    run(scaler, model, 2)
    assert scaler.health().condition is Condition.OK


def test_a_skip_of_a_policy_that_only_checks_is_not_one_of_calibration() -> None:
    model, scaler = small_model(), GradScaler(torch.get_default_device().type, policy=CheckOnly())
    run(scaler, model, 1, bad=math.inf)
    run(scaler, model, 9)
    assert scaler.health().condition is Condition.OK


def test_parameters_of_several_optimizers_that_all_have_gradients_are_not_unused() -> None:
    owners = [parameter(), parameter()]
    optimizers = [torch.optim.SGD([owner], lr=0.1) for owner in owners]
    scaler = GradScaler(torch.get_default_device().type, init_scale=8.0)
    scaler.scale(torch.stack([owner.sum() for owner in owners]).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert "no gradient" not in str(scaler.health())
