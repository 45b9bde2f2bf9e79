"""What is refused: trainers that cannot be helped, losses that cannot be scaled, and calls in the wrong order."""

from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd
from tests.mxnet.helpers import ONE, TWO, backward, make_parameter, make_trainer, use_mxnets_amp, weights

from gradscale import NoScaling
from gradscale.mxnet import init_trainer, scale_loss, scaler_of, unscale


def test_a_trainer_without_a_scaler_is_refused() -> None:
    trainer = make_trainer(make_parameter())
    for call in (scaler_of, unscale, lambda trainer: scale_loss(nd.ones(1), trainer).__enter__()):
        with pytest.raises(RuntimeError, match=r"must have a loss scaler\. Received: .*Call `gradscale\.mxnet\."):
            call(trainer)


def test_a_result_before_the_first_step_is_refused() -> None:
    with pytest.raises(RuntimeError, match="There is a result once a step was taken"):
        _ = init_trainer(make_trainer(make_parameter())).last


def test_a_loss_that_is_not_recorded_is_refused() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer)
    with (
        pytest.raises(RuntimeError, match=r"Call it inside `with autograd\.record\(\):`"),
        scale_loss(nd.ones(1), trainer),
    ):
        pass


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (1.0, r"must be an MXNet array, or a list or tuple of them\. Received: 1\.0 \(float\)"),
        (nd.ones(1, dtype="float16"), r"must be float32 or wider.*Received: float16\. Cast the model's outputs"),
        (nd.ones(1, dtype="int32"), r"must be float32 or wider.*Received: int32"),
        (nd.amp_cast(nd.ones(1), dtype="bfloat16"), r"must be float32 or wider.*Received: bfloat16"),
    ],
    ids=["number", "float16", "int32", "bfloat16"],
)
def test_a_loss_that_cannot_be_scaled_is_refused(loss: Any, text: str) -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer)
    with autograd.record(), pytest.raises(TypeError, match=text), scale_loss(loss, trainer):
        pass


def test_gradients_of_a_loss_that_was_not_scaled_are_refused() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer)
    with autograd.record():
        loss = trainer._params[0].data().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"`step` needs gradients of a scaled loss\. Received: gradients, but no"):
        trainer.step(1)
    assert weights(trainer) == [[1.0, 1.0, 1.0]]


def test_anything_but_a_gluon_trainer_is_refused() -> None:
    optimizer: Any = mx.optimizer.SGD()
    with pytest.raises(TypeError, match=r"`trainer` must be a `gluon\.Trainer`\. Received: .*\(SGD\)"):
        init_trainer(optimizer)


def test_a_second_scaler_is_refused() -> None:
    trainer = make_trainer(make_parameter())
    init_trainer(trainer)
    with pytest.raises(ValueError, match=r"A trainer is initialized once\. Received: a trainer that has a scaler"):
        init_trainer(trainer)
    trainer = make_trainer(make_parameter())
    use_mxnets_amp(trainer)
    with pytest.raises(ValueError, match=r"Received: a trainer that has MXNet's own\. Remove the call of `amp\."):
        init_trainer(trainer)


def test_weights_in_float16_without_masters_are_refused() -> None:
    param = make_parameter(dtype="float16")
    trainer = gluon.Trainer([param], "sgd", {"multi_precision": False})
    with pytest.raises(ValueError, match=r"parameters in float16: weight\. Add 'multi_precision': True to `opt"):
        init_trainer(trainer)
    init_trainer(trainer, NoScaling())


def test_weights_that_are_cast_to_float16_later_are_refused_without_masters() -> None:
    param = make_parameter()
    trainer = gluon.Trainer([param], "sgd", {"learning_rate": 1.0})
    scaler = init_trainer(trainer)
    param.cast("float16")
    backward(trainer, (0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match=r"parameters in float16: weight\. Add 'multi_precision': True to `opt"):
        trainer.step(2**20)
    assert (weights(trainer), scaler.state.applied) == ([[1.0, 1.0, 1.0]], 0)


def test_frozen_weights_in_float16_need_no_masters() -> None:
    frozen, trained = make_parameter(dtype="float16", name="frozen", grad_req="null"), make_parameter(name="trained")
    init_trainer(gluon.Trainer([frozen, trained], "sgd"))


@pytest.mark.parametrize("options", [{"warmup_strategy": "lars"}, {"batch_scale": 2}], ids=["lars", "batch_scale"])
def test_an_optimizer_that_uses_gradients_while_they_are_scaled_is_refused(options: dict[str, Any]) -> None:
    trainer = gluon.Trainer([make_parameter()], "lbsgd", options)
    with pytest.raises(ValueError, match=r"unscale gradients before it uses them\. `LBSGD` .*Received: warmup_str"):
        init_trainer(trainer)
    init_trainer(trainer, NoScaling())
    init_trainer(gluon.Trainer([make_parameter()], "lbsgd"))


def test_a_bound_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`clip_norm` must be greater than 0\. Received: clip_norm=-1\.0"):
        init_trainer(make_trainer(make_parameter()), clip_norm=-1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"update_on_kvstore": True}, r"Received: update_on_kvstore=True\. Leave the argument of `Trainer` out"),
        ({"kvstore": "dist_async"}, r"Received: kvstore='dist_async'\. Use 'dist_sync' instead"),
    ],
    ids=["update_on_kvstore", "dist_async"],
)
def test_a_store_that_updates_the_weights_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        init_trainer(make_trainer(make_parameter(), **options))


def test_a_trainer_whose_store_is_made_already_is_refused_if_it_updates_the_weights(tmp_path: Any) -> None:
    trainer = make_trainer(make_parameter(TWO))
    trainer.save_states(str(tmp_path / "states"))
    with pytest.raises(ValueError, match=r"Call `init_trainer` right after the trainer is made, before `step`"):
        init_trainer(trainer)
    trainer = make_trainer(make_parameter(ONE))
    trainer.save_states(str(tmp_path / "states"))
    init_trainer(trainer)


def test_compressed_gradients_are_refused() -> None:
    options = {"type": "2bit", "threshold": 0.5}
    with pytest.raises(ValueError, match=r"Received: compression_params=\{'type': '2bit'.*Leave the argument of `Trai"):
        init_trainer(make_trainer(make_parameter(TWO), compression_params=options))


def test_sparse_weights_are_refused() -> None:
    param = gluon.Parameter("weight", shape=(4, 2), stype="row_sparse", grad_stype="row_sparse")
    param.initialize(mx.init.One())
    with pytest.raises(ValueError, match=r"Received: sparse weights\. Use dense weights; gradients may be sparse"):
        init_trainer(make_trainer(param))
