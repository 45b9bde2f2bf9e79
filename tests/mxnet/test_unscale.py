"""`unscale`: unscaled gradients between the backward pass and the step, and an overflow that nobody can hide."""

import math

import pytest
from mxnet import autograd, gluon, nd
from tests.mxnet.helpers import backward, make_parameter, make_trainer, weights

from gradscale import Dynamic, Headroom, Static, Status, preset
from gradscale.engine.culprits import Culprit
from gradscale.mxnet import init_trainer, scale_loss, unscale


def test_gradients_are_unscaled_afterwards_and_the_step_divides_by_the_batch_size_alone() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, Static(1024.0))
    backward(trainer, (0.5, -0.25, 2.0))
    unscale(trainer)
    assert trainer._params[0].grad().asnumpy().tolist() == [0.5, -0.25, 2.0]
    trainer.step(2)
    assert weights(trainer) == [[0.75, 1.125, 0.0]]


def test_the_next_step_is_scaled_again() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, Static(1024.0))
    for count in (1, 2):
        backward(trainer, (0.5, 0.0, 0.0))
        if count == 1:
            unscale(trainer)
        trainer.step(1)
        assert weights(trainer) == [[1 - 0.5 * count, 1.0, 1.0]]


def test_edited_gradients_are_applied() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Static(1024.0))
    backward(trainer, (3.0, 0.0, 4.0))
    unscale(trainer)
    assert gluon.utils.clip_global_norm(trainer._params[0].list_grad(), 2.5) == 5.0
    trainer.step(1)
    assert weights(trainer)[0] == pytest.approx([1 - 1.5, 1.0, 1 - 2.0], rel=1e-6)
    assert scaler.last.grad_norm == pytest.approx(2.5, rel=1e-6)


def test_an_overflow_that_is_clipped_away_still_skips_the_step() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Dynamic())
    backward(trainer, (math.inf, 0.5, math.nan))
    unscale(trainer)
    trainer._params[0].grad()[:] = 0.25
    trainer.step(1)
    assert (scaler.last.status(), scaler.loss_scale) == (Status.OVERFLOW, 32768.0)
    assert scaler.last.culprits() == [Culprit("weight", "nan", 2)]
    assert weights(trainer) == [[1.0, 1.0, 1.0]]


def test_an_edit_that_makes_a_gradient_infinite_skips_the_step() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Dynamic())
    backward(trainer, (0.5, 0.5, 0.5))
    unscale(trainer)
    trainer._params[0].grad()[0] = math.inf
    trainer.step(1)
    assert (scaler.last.status(), scaler.last.culprits()) == (Status.OVERFLOW, [Culprit("weight", "inf", 1)])


def test_the_policy_is_given_the_gradients_as_they_were() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Headroom())
    backward(trainer, (2.0**-10, 0.0, 0.0))
    unscale(trainer)
    trainer._params[0].grad()[:] = 0.0
    trainer.step(1)
    assert (scaler.last.amax, scaler.last.grad_norm) == (2.0**-10, 0.0)
    assert scaler.loss_scale == 2.0**19  # not 2**16, which Headroom makes of zeros


@pytest.mark.parametrize("again", [False, True], ids=["then step alone", "then unscaled too"])
def test_a_batch_that_is_unscaled_and_then_dropped_leaves_the_next_one_right(again: bool) -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, Static(1024.0))
    backward(trainer, (100.0, 0.0, 0.0))
    unscale(trainer)
    backward(trainer, (0.5, -0.25, 0.0))
    if again:
        unscale(trainer)
    trainer.step(1)
    assert weights(trainer) == [[0.5, 1.25, 1.0]]


def test_gradients_of_a_further_loss_join_those_that_were_unscaled() -> None:
    param = make_parameter(dtype="float16", grad_req="add")
    trainer = make_trainer(param)
    init_trainer(trainer, Static(1024.0))
    for index, slope in enumerate(((0.5, 0.0, 0.25), (0.25, -0.25, 0.0))):
        with autograd.record():
            loss = (nd.cast(param.data(), dtype="float32") * nd.array(slope)).sum()
            with scale_loss(loss, trainer) as scaled:
                scaled.backward()
        if index == 0:
            unscale(trainer)
    assert param.grad().asnumpy().tolist() == [768.0, -256.0, 256.0]
    trainer.step(1)
    assert weights(trainer) == [[0.25, 1.25, 0.75]]


def test_an_overflow_of_a_batch_that_is_dropped_skips_the_step_that_follows() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Dynamic())
    backward(trainer, (math.inf, 0.0, 0.0))
    unscale(trainer)
    for status, scale in ((Status.OVERFLOW, 32768.0), (Status.APPLIED, 32768.0)):
        backward(trainer, (0.5, 0.0, 0.0))
        unscale(trainer)
        trainer.step(1)
        assert (scaler.last.status(), scaler.loss_scale) == (status, scale)
    assert weights(trainer) == [[0.5, 1.0, 1.0]]


def test_a_trainer_of_frozen_parameters_alone_has_nothing_to_unscale() -> None:
    param = make_parameter(grad_req="null")
    trainer = make_trainer(param)
    scaler = init_trainer(trainer)
    with autograd.record(), scale_loss(param.data().sum(), trainer):
        pass
    unscale(trainer)
    trainer.step(1)
    assert (scaler.last.status(), scaler.last.culprits()) == (Status.NO_GRADS, [])


def test_mxnet_may_be_recording() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, Static(1024.0))
    backward(trainer, (0.5, 0.0, 0.0))
    with autograd.record():
        unscale(trainer)
    assert trainer._params[0].grad().asnumpy().tolist() == [0.5, 0.0, 0.0]


def test_float16_gradients_are_divided_in_float32() -> None:
    trainer = make_trainer(make_parameter(dtype="float16"))
    init_trainer(trainer, Static(2.0**30))  # one over it is zero in float16
    backward(trainer, (2.0**-20, 2.0**-24, 2.0**-26))
    unscale(trainer)
    assert trainer._params[0].grad().asnumpy().tolist() == [2.0**-20, 2.0**-24, 0.0]


@pytest.mark.parametrize("early", [False, True], ids=["step alone", "unscaled first"])
def test_the_lowest_scale_divides_gradients_exactly(early: bool) -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, preset("mxnet"))  # which has no floor
    saved = scaler.state_dict()
    scaler.load_state_dict(saved | {"state": saved["state"] | {"scale": 2.0**-126}})
    backward(trainer, (math.inf, 0.5, 0.5))
    trainer.step(1)
    assert (scaler.last.next_scale, scaler.last.status()) == (2.0**-126, Status.OVERFLOW)
    backward(trainer, (0.5, 0.5, 0.5))
    if early:
        unscale(trainer)
    trainer.step(1)
    assert scaler.last.applied
    assert weights(trainer) == [[0.5, 0.5, 0.5]]


def test_a_scale_that_gradients_cannot_be_divided_by_is_not_loaded() -> None:
    scaler = init_trainer(make_trainer(make_parameter()), preset("mxnet"))
    saved = scaler.state_dict()
    for scale in (0.0, 2.0**-129, 2.0**127):
        with pytest.raises(ValueError, match=r"between 2\*\*-126 and 2\*\*126"):
            scaler.load_state_dict(saved | {"state": saved["state"] | {"scale": scale}})
    assert scaler.state_dict() == saved


def test_to_unscale_twice_is_refused() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer)
    backward(trainer, (0.5, 0.5, 0.5))
    unscale(trainer)
    with pytest.raises(RuntimeError, match=r"unscaled once per step\. `unscale` was called before; remove one call"):
        unscale(trainer)


def test_to_unscale_what_was_not_scaled_is_refused() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer)
    with pytest.raises(RuntimeError, match=r"`unscale` needs gradients of a scaled loss"):
        unscale(trainer)
