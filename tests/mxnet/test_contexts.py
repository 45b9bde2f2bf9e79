"""Several contexts: an overflow on one of them reaches no weight on any, which MXNet's own amp does not keep."""

import math
from typing import Any

import pytest
from mxnet import autograd
from mxnet.contrib import amp
from tests.mxnet.helpers import TWO, backward, losses, make_parameter, make_trainer, use_mxnets_amp, weights

from gradscale import Dynamic, Static, Status
from gradscale.engine.culprits import Culprit
from gradscale.mxnet import init_trainer, unscale

CLEAN = (0.5, 0.25, 0.0)
INF = (0.5, math.inf, 0.0)
STORES = ["device", "local", None]


def step_with_mxnets_amp(store: str | None, *slopes: Any) -> list[list[float]]:
    """Returns the weights after a step with MXNet's own loss scaler, which starts at 65536."""
    trainer = make_trainer(make_parameter(TWO), kvstore=store)
    use_mxnets_amp(trainer)
    with autograd.record(), amp.scale_loss(losses(trainer, *slopes), trainer) as scaled:
        autograd.backward(scaled)
    trainer.step(1)
    return weights(trainer)


@pytest.mark.parametrize("store", STORES)
def test_mxnets_own_amp_writes_an_overflow_into_the_weights(store: str | None) -> None:
    first, second = step_with_mxnets_amp(store, CLEAN, INF)
    assert second[1] == -math.inf
    assert first[1] == (1.0 - 0.25 if store is None else -math.inf)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("slopes", [(CLEAN, INF), (INF, CLEAN)], ids=["second", "first"])
def test_an_overflow_on_one_context_reaches_no_weight_on_any(store: str | None, slopes: Any) -> None:
    trainer = make_trainer(make_parameter(TWO), kvstore=store)
    scaler = init_trainer(trainer, Dynamic())
    backward(trainer, *slopes)
    trainer.step(1)
    assert weights(trainer) == [[1.0, 1.0, 1.0]] * 2
    assert (scaler.last.status(), scaler.loss_scale) == (Status.OVERFLOW, 32768.0)
    assert scaler.last.culprits() == [Culprit("weight", "inf", 1)]


@pytest.mark.parametrize("store", ["device", "local"])
def test_gradients_of_all_contexts_are_added_up_and_divided_by_the_scale(store: str) -> None:
    trainer = make_trainer(make_parameter(TWO), kvstore=store)
    scaler = init_trainer(trainer, Static(1024.0))
    backward(trainer, CLEAN, (0.5, 0.75, 2.0))
    trainer.step(2)
    assert weights(trainer) == [[0.5, 0.5, 0.0]] * 2
    assert scaler.last.grad_norm == 1.224744871391589  # of (0.5, 0.5, 1)


def test_contexts_without_a_store_each_keep_their_own_gradients_and_share_the_gate() -> None:
    trainer = make_trainer(make_parameter(TWO), kvstore=None)
    scaler = init_trainer(trainer, Static(1024.0), clip_norm=1.0)
    backward(trainer, (0.0, 0.0, 0.5), (0.0, 0.0, 2.0))
    trainer.step(1)
    assert scaler.last.grad_norm == 2.0  # the larger of the two, so that neither passes the bound
    assert [row[2] for row in weights(trainer)] == pytest.approx([0.75, 0.0], abs=1e-6)


def test_an_overflow_that_only_the_sum_has_is_found() -> None:
    trainer = make_trainer(make_parameter(TWO, "float16"))
    scaler = init_trainer(trainer, Static(65536.0))
    backward(trainer, (0.75, 0.0, 0.0), (0.75, 0.0, 0.0))  # each fits float16 at this scale; their sum does not
    trainer.step(1)
    assert (scaler.last.status(), weights(trainer)) == (Status.OVERFLOW, [[1.0, 1.0, 1.0]] * 2)


def test_a_loss_that_is_not_finite_on_one_context_skips_the_step_on_all() -> None:
    trainer = make_trainer(make_parameter(TWO))
    scaler = init_trainer(trainer, Dynamic())
    with autograd.record():
        good, _ = losses(trainer, CLEAN, CLEAN)
        _, bad = losses(trainer, CLEAN, CLEAN, value=math.inf)
        scaled = [scaler.scale(loss) for loss in (good, bad)]
    autograd.backward(scaled)
    trainer.step(1)
    assert (scaler.last.status(), scaler.loss_scale) == (Status.NONFINITE_LOSS, 65536.0)
    assert weights(trainer) == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(("slope", "status"), [(CLEAN, Status.APPLIED), (INF, Status.OVERFLOW)], ids=["clean", "inf"])
def test_a_context_that_takes_no_part_is_left_alone(slope: Any, status: Status) -> None:
    trainer = make_trainer(make_parameter(TWO), kvstore=None)
    scaler = init_trainer(trainer, Static(1024.0))
    with autograd.record():
        _, scaled = (scaler.scale(loss) for loss in losses(trainer, CLEAN, slope))
    scaled.backward()
    trainer.step(1, ignore_stale_grad=True)
    after = [0.5, 0.75, 1.0] if status is Status.APPLIED else [1.0, 1.0, 1.0]
    assert (scaler.last.status(), weights(trainer)) == (status, [[1.0, 1.0, 1.0], after])


@pytest.mark.parametrize("early", [False, True], ids=["reduced first", "unscaled first"])
def test_gradients_may_be_reduced_unscaled_and_updated_one_by_one(early: bool) -> None:
    trainer = make_trainer(make_parameter(TWO))
    scaler = init_trainer(trainer, Static(1024.0))
    backward(trainer, CLEAN, (0.5, 0.75, 2.0))
    if early:
        unscale(trainer)
    trainer.allreduce_grads()
    if not early:
        unscale(trainer)
    assert [grad.asnumpy().tolist() for grad in trainer._params[0].list_grad()] == [[1.0, 1.0, 2.0]] * 2
    trainer.update(2)
    assert (scaler.last.applied, weights(trainer)) == (True, [[0.5, 0.5, 0.0]] * 2)
