"""`metrics`: what they hold, before, between and after steps."""

import math

import pytest
import torch
from tests.torch.helpers import INF, give, loss_of, small_model, train_step
from torch import nn

from gradscale import Dynamic, NoScaling, Policy, Static
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")

KEYS = {"scale", "applied", "skipped", "skip_rate", "grad_norm", "headroom_bits"}


def test_before_the_first_step_only_the_scale_is_known() -> None:
    metrics = LossScaler(policy=Dynamic(init_scale=256.0)).metrics()
    assert metrics.keys() == KEYS
    assert (metrics["scale"], metrics["applied"], metrics["skipped"], metrics["skip_rate"]) == (256.0, 0, 0, 0)
    assert math.isnan(metrics["grad_norm"])
    assert math.isnan(metrics["headroom_bits"])


@pytest.mark.parametrize("policy", [Dynamic(init_scale=256.0), NoScaling()])
def test_metrics_are_known_whatever_torchs_default_device_is(policy: Policy) -> None:
    model = small_model()
    loss, optimizer = loss_of(model), torch.optim.SGD(model.parameters())
    scaler = LossScaler(model, policy)
    with torch.device("meta"):
        scaler.backward(loss)
        scaler.step(optimizer, clip_norm=1.0, clip_value=1.0)
        metrics = scaler.metrics()
    assert metrics["applied"] == 1.0
    assert metrics["grad_norm"] > 0


def test_metrics_before_the_first_loss_do_not_choose_the_device() -> None:
    scaler = LossScaler(policy=Dynamic())
    scaler.metrics()
    scaler.scale(torch.ones((), device="meta"))
    assert scaler.loss_scale.device.type == "meta"


def test_counts_rate_norm_and_headroom_are_those_of_the_run() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    scaler = LossScaler(policy=Dynamic(init_scale=1024.0))
    for bad in (False, True, False, False):
        scale = scaler.loss_scale.item()
        give(scaler, [weight], [torch.tensor([INF if bad else 3.0 * scale, 4.0 * scale])])
        scaler.step(optimizer, norm=True)
        optimizer.zero_grad()
    metrics = scaler.metrics()
    assert metrics == {
        "scale": 512.0,
        "applied": 3.0,
        "skipped": 1.0,
        "skip_rate": 0.25,
        "grad_norm": 5.0,
        "headroom_bits": math.log2(65504 / (4.0 * 512.0)),
    }


def test_headroom_is_that_of_the_largest_gradient_where_no_norm_is_measured() -> None:
    weight = nn.Parameter(torch.zeros(2))
    scaler = LossScaler(policy=Static(512.0))
    give(scaler, [weight], [torch.tensor([3.0, -4.0]) * 512.0])
    scaler.step(torch.optim.SGD([weight]))
    assert scaler.metrics()["headroom_bits"] == pytest.approx(math.log2(65504 / (4.0 * 512.0)))


def test_a_skipped_step_has_no_headroom() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(model, Dynamic())
    train_step(scaler, model, optimizer, bad=INF)
    assert math.isnan(scaler.metrics()["headroom_bits"])


def test_without_scaling_steps_are_still_counted() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(model, NoScaling())
    for _ in range(3):
        train_step(scaler, model, optimizer)
    assert scaler.metrics()["applied"] == 3.0


def test_metrics_may_be_asked_for_in_the_middle_of_a_step() -> None:
    model = small_model()
    scaler = LossScaler(model, Dynamic(init_scale=64.0))
    scaler.backward(loss_of(model))
    assert scaler.metrics()["scale"] == 64.0
    assert not scaler.step(torch.optim.SGD(model.parameters())).skipped()
