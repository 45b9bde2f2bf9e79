"""`init_trainer` and `scale_loss`: what a trainer does that has a scaler."""

import math
from dataclasses import replace
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp
from tests.mxnet.helpers import backward, losses, make_parameter, make_trainer, use_mxnets_amp, weights
from tests.other_names import check_answers

from gradscale import Dynamic, Headroom, NoScaling, Seen, Static, Status, preset
from gradscale.engine.culprits import Culprit
from gradscale.mxnet import init_trainer, scale_loss, unscale
from gradscale.policies.scalars import SCALARS

CLEAN = (0.5, -0.25, 0.0)
INF = (0.5, math.inf, 0.0)
NAN = (math.nan, math.inf, 0.0)


def test_a_clean_step_divides_by_the_scale_and_by_the_batch_size() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Static(1024.0))
    backward(trainer, CLEAN)
    trainer.step(2)
    assert weights(trainer) == [[0.75, 1.125, 1.0]]
    result = scaler.last
    assert (result.status(), result.applied, result.skipped()) == (Status.APPLIED, True, False)
    assert (result.scale, result.next_scale, result.culprits()) == (1024.0, 1024.0, [])
    assert result.grad_norm == pytest.approx(math.hypot(0.25, 0.125), rel=1e-6)


def test_the_factor_of_the_optimizer_is_its_own_again_after_the_step() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, Static(1024.0))
    backward(trainer, CLEAN)
    trainer.step(4)
    assert (trainer.optimizer.rescale_grad, trainer._scale) == (0.25, 1.0)


@pytest.mark.parametrize(
    ("slope", "culprit"), [(INF, Culprit("weight", "inf", 1)), (NAN, Culprit("weight", "nan", 2))], ids=["inf", "nan"]
)
def test_an_overflow_leaves_the_weights_and_lowers_the_scale_at_once(slope: Any, culprit: Culprit) -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer)
    backward(trainer, slope)
    trainer.step(1)
    assert weights(trainer) == [[1.0, 1.0, 1.0]]
    assert (scaler.last.status(), scaler.last.skipped()) == (Status.OVERFLOW, True)
    assert (scaler.last.scale, scaler.last.next_scale, scaler.loss_scale) == (65536.0, 32768.0, 32768.0)
    assert scaler.last.culprits() == [culprit]


def test_a_skipped_step_leaves_the_state_of_the_optimizer() -> None:
    trainer = gluon.Trainer([make_parameter()], "adam")
    init_trainer(trainer)
    backward(trainer, CLEAN)
    trainer.step(1)
    mean, square = (one.asnumpy() for one in trainer._updaters[0].states[0])
    count = trainer.optimizer.num_update
    backward(trainer, INF)
    trainer.step(1)
    assert [one.asnumpy().tolist() for one in trainer._updaters[0].states[0]] == [mean.tolist(), square.tolist()]
    assert trainer.optimizer.num_update == count


def test_only_the_parameters_that_overflowed_are_culprits() -> None:
    first, second = make_parameter(name="first"), make_parameter(name="second", dtype="float16")
    trainer = make_trainer(first, second)
    scaler = init_trainer(trainer, Static(65536.0))
    backward(trainer, (2.0, 0.0, 3.0))  # at this scale too large for float16
    trainer.step(1)
    assert scaler.last.culprits() == [Culprit("second", "inf", 2)]
    assert weights(trainer) == [[1.0, 1.0, 1.0]]


def test_the_default_never_reaches_zero() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, max_consecutive_skips=1000)
    for _ in range(150):
        backward(trainer, INF)
        trainer.step(1)
    assert (scaler.loss_scale, bool(scaler.state.stuck)) == (2.0**-126, True)
    backward(trainer, CLEAN)
    trainer.step(1)
    assert weights(trainer) == [[0.5, 1.25, 1.0]]


def test_the_default_grows_as_mxnets_own_does() -> None:
    ours, theirs = init_trainer(make_trainer(make_parameter())).policy, preset("mxnet")
    one, other = (replace(policy.start(), scale=np.float32(2.0**21)) for policy in (ours, theirs))
    for step in range(20_000):
        seen = Seen(finite=np.bool_(step % 7000 != 6999))
        one, other = ours.next(one, seen, SCALARS), theirs.next(other, seen, SCALARS)
    assert (float(one.scale), int(one.clean_steps)) == (float(other.scale), int(other.clean_steps))


def test_auto_follows_the_largest_gradient() -> None:
    assert init_trainer(make_trainer(make_parameter()), "auto").policy == Headroom()
    assert init_trainer(make_trainer(make_parameter()), "static:1024").policy == Static(1024)
    with pytest.raises(ValueError, match=r"must be a policy, .* or name one\. Received: policy='o1'"):
        init_trainer(make_trainer(make_parameter()), "o1")


def test_the_state_keeps_its_types_with_numpy_1_too() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Dynamic(init_scale=3.0, growth_factor=1.1, backoff_factor=0.7, growth_interval=1))
    for slope in (CLEAN, INF, CLEAN):
        backward(trainer, slope)
        trainer.step(1)
    assert scaler.state.scale == np.float32(3.0) * np.float32(1.1) * np.float32(0.7) * np.float32(1.1)
    kinds = [getattr(scaler.state, name).dtype.name for name in ("scale", "clean_steps", "applied", "stuck")]
    assert kinds == ["float32", "int32", "int32", "bool"]


def test_parameters_may_be_initialised_after_the_trainer_is_made() -> None:
    net = gluon.nn.Dense(1, use_bias=False)
    net.initialize(mx.init.One())
    trainer = make_trainer(*net.collect_params().values())
    scaler = init_trainer(trainer, Static(8.0))
    with autograd.record(), scale_loss(net(nd.ones((1, 3))), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert (scaler.last.applied, weights(trainer)) == (True, [[[0.0, 0.0, 0.0]]])


def test_a_policy_that_needs_amax_is_given_that_of_the_backward_pass() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Headroom())
    backward(trainer, (2.0**-10, 0.0, -(2.0**-20)))
    trainer.step(64)
    assert (scaler.last.amax, scaler.last.next_scale) == (2.0**-10, 2.0**19)  # 4 bits below what fits
    assert scaler.metrics()["headroom_bits"] == pytest.approx(math.log2(65504) + 10 - 19)


def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Dynamic())
    backward(trainer, CLEAN, value=math.nan)
    trainer.step(1)
    assert (scaler.last.status(), scaler.loss_scale) == (Status.NONFINITE_LOSS, 65536.0)
    assert weights(trainer) == [[1.0, 1.0, 1.0]]
    backward(trainer, CLEAN)
    trainer.step(1)
    assert scaler.last.applied


def scaled_product(param: Any, slope: Any, trainer: Any) -> Any:
    """Returns a scaled loss with the gradient `slope`, which MXNet adds to those before if `grad_req` is "add"."""
    with autograd.record(), scale_loss((param.data() * nd.array(slope)).sum(), trainer) as scaled:
        return scaled


def test_the_loss_of_an_earlier_backward_pass_skips_the_step_that_uses_its_gradients() -> None:
    param = make_parameter(grad_req="add")
    trainer = make_trainer(param)
    scaler = init_trainer(trainer, Dynamic())
    for slope in (NAN, CLEAN):
        scaled_product(param, slope, trainer).backward()
    trainer.step(1)
    assert (scaler.last.status(), scaler.loss_scale) == (Status.NONFINITE_LOSS, 65536.0)


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("differentiated", [True, False])
def test_the_loss_of_an_abandoned_batch_does_not_skip_the_next(grad_req: str, differentiated: bool) -> None:
    param = make_parameter(grad_req=grad_req)
    trainer = make_trainer(param)
    scaler = init_trainer(trainer, Dynamic())
    abandoned = scaled_product(param, NAN, trainer)
    if differentiated:
        abandoned.backward()
        param.zero_grad()
    scaled_product(param, CLEAN, trainer).backward()
    trainer.step(1)
    assert (scaler.last.status(), weights(trainer)) == (Status.APPLIED, [[0.5, 1.25, 1.0]])


def test_the_norm_is_clipped_as_the_optimizer_sees_it() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Static(1024.0), clip_norm=2.5)
    backward(trainer, (6.0, 0.0, -8.0))
    trainer.step(2)
    assert scaler.last.grad_norm == 5.0
    assert weights(trainer)[0] == pytest.approx([1 - 1.5, 1.0, 1 + 2.0], rel=1e-6)


def test_the_update_is_that_of_mxnets_own_amp() -> None:
    ours, theirs = make_trainer(make_parameter()), make_trainer(make_parameter())
    init_trainer(ours, Static(65536.0))
    use_mxnets_amp(theirs)
    rng = np.random.default_rng(0)
    for _ in range(5):
        slope = rng.normal(size=3)
        backward(ours, slope)
        ours.step(3)
        with autograd.record(), amp.scale_loss(losses(theirs, slope), theirs) as scaled:
            autograd.backward(scaled)
        theirs.step(3)
        assert weights(ours) == weights(theirs)


def test_gradients_of_several_losses_add_up() -> None:
    param = make_parameter(grad_req="add")
    trainer = make_trainer(param)
    init_trainer(trainer, Static(1024.0))
    for slope in ((1.0, 2.0, 0.0), (0.0, 2.0, 4.0)):
        with autograd.record(), scale_loss((param.data() * nd.array(slope)).sum(), trainer) as scaled:
            scaled.backward()
    trainer.step(2)
    assert weights(trainer) == [[0.5, -1.0, -1.0]]


def test_a_stale_gradient_is_reported_by_mxnet_and_nothing_has_changed() -> None:
    first, second = make_parameter(name="first"), make_parameter(name="second")
    trainer = make_trainer(first, second)
    scaler = init_trainer(trainer)
    with autograd.record(), scale_loss(first.data().sum(), trainer) as scaled:
        scaled.backward()
    with pytest.raises(UserWarning, match="Gradient of Parameter `second` on context cpu\\(0\\) has not been updated"):
        trainer.step(1)
    assert (scaler.state.applied, scaler.state.skipped) == (0, 0)
    assert weights(trainer) == [[1.0, 1.0, 1.0]]


def test_an_update_that_fails_leaves_the_scale_its_counters_and_the_factor() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Dynamic(growth_interval=1))
    own = trainer.optimizer.update_multi_precision
    trainer.optimizer.update_multi_precision = _fail
    backward(trainer, CLEAN)
    unscale(trainer)
    before = scaler.state
    with pytest.raises(OSError, match="the optimizer fails"):
        trainer.step(4)
    assert (scaler.state, trainer.optimizer.rescale_grad) == (before, 0.25)
    with pytest.raises(RuntimeError, match="There is a result once a step was taken"):
        _ = scaler.last
    trainer.optimizer.update_multi_precision = own
    backward(trainer, CLEAN)
    trainer.step(1)
    assert (weights(trainer), int(scaler.state.applied)) == ([[0.5, 1.25, 1.0]], 1)


def _fail(*_: Any) -> None:
    raise OSError("the optimizer fails")


def test_an_overflow_is_forgotten_once_its_step_is_skipped() -> None:
    first, second = make_parameter(name="first"), make_parameter(name="second")
    trainer = make_trainer(first, second)
    scaler = init_trainer(trainer)
    backward(trainer, INF)
    trainer.step(1)
    # The second parameter takes no part this time, and still holds the inf of the last.
    with autograd.record(), scale_loss(first.data().sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1, ignore_stale_grad=True)
    assert scaler.last.applied
    assert (weights(trainer), second.data().asnumpy().tolist()) == ([[0.0, 0.0, 0.0]], [1.0, 1.0, 1.0])


def test_a_step_without_gradients_changes_nothing() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer)
    before = scaler.state
    trainer.step(1, ignore_stale_grad=True)
    assert (scaler.last.status(), scaler.last.skipped(), scaler.state) == (Status.NO_GRADS, True, before)


def test_frozen_parameters_are_left_alone() -> None:
    frozen, trained = make_parameter(name="frozen", grad_req="null"), make_parameter(name="trained")
    trainer = make_trainer(frozen, trained)
    init_trainer(trainer, Static(4.0))
    with autograd.record(), scale_loss(trained.data().sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert (frozen.data().asnumpy().tolist(), trained.data().asnumpy().tolist()) == ([1.0] * 3, [0.0] * 3)


def test_no_scaling_reads_no_gradient() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, NoScaling())
    backward(trainer, INF)
    trainer.step(1)
    assert (scaler.last.applied, scaler.last.grad_norm, weights(trainer)[0][1]) == (True, None, -math.inf)


def test_one_loss_is_yielded_as_it_came_and_several_as_a_list() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, Static(8.0))
    loss = nd.array([1.0, 2.0])
    with autograd.record():
        with scale_loss(loss, trainer) as scaled:
            assert scaled.asnumpy().tolist() == [8.0, 16.0]
        with scale_loss((loss, loss), trainer) as scaled:
            assert [one.asnumpy().tolist() for one in scaled] == [[8.0, 16.0]] * 2


def test_arrays_of_mxnets_numpy_mode_are_taken() -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        param = gluon.Parameter("weight", shape=(3,))
        param.initialize(mx.init.One())
        trainer = make_trainer(param)
        scaler = init_trainer(trainer, Static(4.0), clip_norm=100.0)
        with autograd.record(), scale_loss((param.data() * 2).sum(), trainer) as scaled:
            scaled.backward()
        unscale(trainer)
        assert type(param.grad()) is mx.np.ndarray
        trainer.step(1)
        assert (scaler.last.applied, param.data().asnumpy().tolist()) == (True, [-1.0, -1.0, -1.0])


def test_sparse_gradients_are_measured_by_the_rows_they_hold() -> None:
    embedding = gluon.nn.Embedding(4, 2, sparse_grad=True)
    embedding.initialize(mx.init.One())
    trainer = make_trainer(*embedding.collect_params().values())
    scaler = init_trainer(trainer, Static(8.0))
    for factor, status in ((1.0, Status.APPLIED), (math.inf, Status.OVERFLOW)):
        with autograd.record(), scale_loss(embedding(nd.array([1])).sum(), trainer) as scaled:
            scaled.backward(nd.array([factor]))
        trainer.step(1)
        assert scaler.last.status() is status
    assert embedding.weight.data().asnumpy().tolist() == [[1, 1], [0, 0], [1, 1], [1, 1]]


def test_the_norm_is_clipped_at_a_scale_so_low_that_squares_vanish() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Static(2.0**-120), clip_norm=2.5)
    backward(trainer, (3.0, 0.0, -4.0))
    trainer.step(1)
    assert scaler.last.grad_norm == 5.0
    assert weights(trainer)[0] == pytest.approx([1 - 1.5, 1.0, 1 + 2.0], rel=1e-6)


def test_a_factor_below_what_mxnet_takes_updates_all_the_same() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer, Static(2.0**126))
    backward(trainer, CLEAN)
    trainer.step(8)  # 2**-129
    assert weights(trainer) == [[0.9375, 1.03125, 1.0]]


def test_a_hard_clip_of_huge_gradients_updates_all_the_same() -> None:
    parameter = make_parameter()
    parameter.set_data(nd.zeros(3))
    trainer = make_trainer(parameter)
    scaler = init_trainer(trainer, Static(1.0), clip_norm=2.0**-70)
    backward(trainer, (2.0**63, 0.0, 0.0))
    trainer.step(1)
    assert scaler.last.applied
    assert weights(trainer) == [[-(2.0**-70), 0.0, 0.0]]


def test_a_norm_whose_square_float32_does_not_hold_cannot_be_clipped() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Static(1.0), clip_norm=0.5)
    backward(trainer, (2.0**64, 0.0, 0.0))
    trainer.step(1)
    assert scaler.last.status() is Status.OVERFLOW
    assert weights(trainer) == [[1.0, 1.0, 1.0]]
    scaler.clip_norm = None
    backward(trainer, (2.0**64, 0.0, 0.0))
    trainer.step(1)
    assert scaler.last.applied
    assert weights(trainer) == [[1.0 - 2.0**64, 1.0, 1.0]]


def test_names_of_other_scalers_are_answered_with_what_to_use() -> None:
    check_answers(init_trainer(make_trainer(make_parameter())), "mxnet")
    with pytest.raises(TypeError, match=r"^`init_trainer` has no argument 'max_norm'\. .* Use `clip_norm=1\.0`\.$"):
        init_trainer(make_trainer(make_parameter()), max_norm=1.0)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


def test_settings_of_other_scalers_are_answered_with_a_policy() -> None:
    with pytest.raises(TypeError, match=r"Use `init_trainer\(trainer, policy=Dynamic\(init_scale=8\.0\)\)`"):
        init_trainer(make_trainer(make_parameter()), init_scale=8.0)  # pyright: ignore[reportCallIssue]


def test_scaler_and_result_are_shown_with_scale_status_and_counts() -> None:
    trainer = make_trainer(make_parameter())
    scaler = init_trainer(trainer, Dynamic(init_scale=8.0))
    assert repr(scaler) == "LossScaler(Dynamic(init_scale=8.0), scale=8.0, applied=0, skipped=0)"
    backward(trainer, CLEAN)
    trainer.step(1)
    assert repr(scaler) == "LossScaler(Dynamic(init_scale=8.0), scale=8.0, applied=1, skipped=0, last=applied)"
    assert repr(scaler.last).startswith("StepResult(status=applied, scale=8.0, next_scale=8.0, grad_norm=0.55")
    with pytest.raises(TypeError, match="A StepResult is neither true nor false"):
        bool(scaler.last)
