"""`ScaleStuck`: a run that skips every step says so, names the parameters, and the likely cause."""

import math
from typing import Any

import pytest
from mxnet import autograd
from tests.mxnet.helpers import TWO, backward, losses, make_parameter, make_trainer, weights

from gradscale import Dynamic, Policy, Static
from gradscale.mxnet import ScaleStuck, init_trainer, scale_loss

INF = (0.5, math.inf, 0.0)
CLEAN = (0.5, -0.25, 0.0)


def overflow(trainer: Any, times: int = 1) -> None:
    for _ in range(times):
        backward(trainer, INF)
        trainer.step(1)


@pytest.mark.parametrize("policy", [Static(8.0), Dynamic(init_scale=1.0, min_scale=1.0)], ids=["static", "floor"])
def test_the_last_skip_that_is_allowed_raises_with_the_culprit(policy: Policy) -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, policy, max_consecutive_skips=3)
    overflow(trainer, 2)
    with pytest.raises(ScaleStuck, match=r"^3 steps in a row .*one parameter, 'weight', overflows.*weight \(inf\)\."):
        overflow(trainer)


def test_the_trainer_goes_on_after_the_error() -> None:
    trainer = make_trainer(make_parameter(TWO))
    scaler = init_trainer(trainer, Static(8.0), max_consecutive_skips=1)
    backward(trainer, INF, CLEAN)
    with pytest.raises(ScaleStuck):
        trainer.step(1)
    assert (int(scaler.state.skipped), scaler.last.skipped(), scaler._losses.given) == (1, True, False)
    assert not any(data._fresh_grad for data in trainer._params[0].list_data())
    backward(trainer, CLEAN, CLEAN)
    trainer.step(2)
    assert weights(trainer) == [[0.5, 1.25, 1.0]] * 2


def test_a_loss_that_is_not_finite_is_named() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, max_consecutive_skips=2)
    for step in range(2):
        with autograd.record(), scale_loss(losses(trainer, CLEAN, value=math.nan), trainer) as scaled:
            autograd.backward(scaled)
        if step == 0:
            trainer.step(1)
    with pytest.raises(ScaleStuck, match="No scale, retry or policy can help"):
        trainer.step(1)
    assert scaler.loss_scale == 65536.0


def test_weights_that_have_diverged_point_at_the_learning_rate() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, max_consecutive_skips=2)
    trainer.set_learning_rate(1e4)
    for step, value in enumerate((1.0, math.nan, math.nan)):
        with autograd.record(), scale_loss(losses(trainer, CLEAN, value=value), trainer) as scaled:
            autograd.backward(scaled)
        if step < 2:
            trainer.step(1)
    with pytest.raises(
        ScaleStuck,
        match=r"NaN since step 2\. The largest weight, .* Likely cause: the learning rate \(10000\) is too high",
    ):
        trainer.step(1)


def test_a_scale_that_can_still_fall_is_not_stuck_nor_is_a_step_without_gradients() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Dynamic(init_scale=4.0, min_scale=1.0), max_consecutive_skips=1)
    overflow(trainer, 2)
    with pytest.raises(ScaleStuck):
        overflow(trainer)
    trainer.step(1, ignore_stale_grad=True)
    assert (scaler.last.status(), int(scaler.state.consecutive_skips)) == ("no_grads", 3)


@pytest.mark.parametrize(("limit", "error"), [(0, ValueError), (2.5, TypeError)])
def test_a_limit_that_is_none_is_refused(limit: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`max_consecutive_skips` must be"):
        init_trainer(make_trainer(make_parameter()), max_consecutive_skips=limit)


def test_the_default_rule_is_stuck_where_no_lower_scale_helps_long_before_its_floor() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer)
    overflow(trainer, 49)
    with pytest.raises(ScaleStuck, match="50 steps in a row were skipped"):
        overflow(trainer, 1)
    assert scaler.loss_scale == 2.0**-34
