"""What MXNet's own amp does where gradscale does better: the page compares the two, and this is what it rests on."""

import math
from typing import Any

from mxnet import autograd
from mxnet.contrib import amp
from tests.mxnet.helpers import losses, make_parameter, make_trainer, use_mxnets_amp, weights

INF = (math.inf, 0.5, 0.5)


def backward(trainer: Any, slope: Any) -> None:
    with autograd.record(), amp.scale_loss(losses(trainer, slope), trainer) as scaled:
        autograd.backward(scaled)


def test_it_uses_the_scale_that_overflowed_once_more() -> None:
    trainer = make_trainer(make_parameter())
    use_mxnets_amp(trainer)
    scales = []
    for _ in range(4):
        scales.append(trainer._amp_loss_scaler.loss_scale)
        backward(trainer, INF)
        trainer.step(1)
    assert scales == [65536.0, 65536.0, 32768.0, 16384.0]


def test_an_old_inf_of_a_parameter_that_takes_no_part_holds_up_every_step() -> None:
    first, second = make_parameter(name="first"), make_parameter(name="second")
    trainer = make_trainer(first, second)
    use_mxnets_amp(trainer)
    backward(trainer, INF)
    trainer.step(1)
    for _ in range(3):
        with autograd.record(), amp.scale_loss(first.data().sum(), trainer) as scaled:
            scaled.backward()
        trainer.step(1, ignore_stale_grad=True)
    assert (weights(trainer), trainer._amp_loss_scaler.loss_scale) == ([[1.0, 1.0, 1.0]], 8192.0)


def test_an_overflow_that_is_clipped_away_is_applied() -> None:
    param = make_parameter()
    trainer = make_trainer(param)
    use_mxnets_amp(trainer)
    backward(trainer, INF)
    amp.unscale(trainer)
    param.grad()[:] = param.grad().clip(-1.0, 1.0)
    trainer.step(1)
    assert weights(trainer) == [[0.0, 0.5, 0.5]]
