"""Parameters whose dtype changes after `MasterWeights` was built."""

import copy
import pickle
import warnings

import pytest
import torch
from tests.torch.helpers import loss_of, same, small_model, weights
from tests.torch.masters.helpers import HALF_DTYPES, STORAGES, everything, give, gradients_of, half_model, wrapped
from tests.torch.versions import needs_grad_dtype
from torch import nn

from gradscale import Static
from gradscale.torch import LossScaler, MasterWeights
from gradscale.torch.masters import Storage


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_model_cast_after_the_optimizer_was_built_has_masters(storage: Storage, dtype: torch.dtype) -> None:
    model, twin = small_model(), half_model(dtype)
    optimizer, expected = wrapped(model, storage), wrapped(twin, storage)
    model.to(dtype)
    for step in range(3):
        for each, stepped in ((model, optimizer), (twin, expected)):
            give(each, step)
            stepped.step()
    assert same(everything(model, optimizer), everything(twin, expected))


@pytest.mark.parametrize("fused", [True, False])
def test_small_gradients_reach_masters_of_a_model_that_was_cast_late(fused: bool) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0, fused=fused))
    parameter.data = parameter.data.half()
    scaler = LossScaler(policy=Static(2.0**16))
    scaler.backward(torch.ones((), requires_grad=True))
    parameter.grad = torch.full((3,), 2.0**-12).half()
    scaler.step(optimizer)
    assert [value.tolist() for _, value in optimizer.masters()] == [[-(2.0**-28)] * 3]


@needs_grad_dtype
def test_float32_gradients_are_asked_for_as_soon_as_a_late_cast_is_seen() -> None:
    model = small_model()
    optimizer = wrapped(model, grad_fp32=True)
    model.half()
    optimizer.sync_from_model()
    model(torch.ones(1, 4).half()).sum().backward()
    assert {grad.dtype for grad in gradients_of(model)} == {torch.float32}
    optimizer.step()


@pytest.mark.parametrize("inner", ["adamw fused", "adamw foreach", "sgd fused", "adagrad fused"])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_state_follows_the_parameters_through_casts(storage: Storage, inner: str) -> None:
    """Float32, FP16, BF16 and float32 again, with a step in each."""
    model = small_model()
    optimizer = wrapped(model, storage, inner)
    for step, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16, torch.float32)):
        model.to(dtype)
        give(model, step)
        before = weights(model)
        optimizer.step()
        assert not same(weights(model), before)
        half = dtype is not torch.float32
        assert all((value is weight) is not half for weight, value in optimizer.masters())
        held = [state[key] for state in optimizer.state.values() for key in state]
        assert {value.dtype for value in held} == {torch.float32}
        assert len(optimizer.state) == len(optimizer.optimizer.state) == 4
        steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
        assert steps <= {step + 1.0}


@pytest.mark.parametrize("storage", STORAGES)
def test_a_float32_model_trains_on_as_with_a_plain_optimizer(storage: Storage) -> None:
    model = half_model()
    optimizer = wrapped(model, storage)
    model.float()
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        for each, stepped in ((model, optimizer), (twin, plain)):
            give(each, step)
            stepped.step()
    assert same(weights(model), weights(twin))


def test_an_export_in_float32_between_steps_loses_no_low_bits() -> None:
    model = half_model()
    optimizer = wrapped(model)
    give(model)
    optimizer.step()
    expected = [value.clone() for _, value in optimizer.masters()]
    model.float()
    optimizer.state_dict()
    assert all(value is weight for weight, value in optimizer.masters())
    model.half()
    assert same([value for _, value in optimizer.masters()], expected)
    copied, other = copy.deepcopy((model, optimizer))
    for each, stepped in ((model, optimizer), (copied, other)):
        give(each, 1)
        stepped.step()
    assert same(everything(copied, other), everything(model, optimizer))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
def test_a_copy_made_between_the_cast_and_the_step_continues_like_the_original(storage: Storage, method: str) -> None:
    model = small_model()
    optimizer = wrapped(model, storage)
    model.half()
    pair = (model, optimizer)
    twin, other = copy.deepcopy(pair) if method == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for step in range(2):
        for each, stepped in ((model, optimizer), (twin, other)):
            give(each, step)
            stepped.step()
    assert same(everything(twin, other), everything(model, optimizer))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_state_is_loaded_into_an_optimizer_that_was_built_before_the_cast(storage: Storage) -> None:
    model, twin = half_model(), small_model()
    optimizer, other = wrapped(model, storage), wrapped(twin, storage)
    give(model)
    optimizer.step()
    twin.half()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    assert same([value for _, value in other.masters()], [value for _, value in optimizer.masters()])


def test_a_model_cast_late_is_not_warned_of_and_has_masters() -> None:
    model = small_model()
    optimizer = wrapped(model)
    model.half()
    scaler = LossScaler(model, Static(1024.0))
    scaler.backward(loss_of(lambda x: model(x.half()).float()))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
    assert {value.dtype for _, value in optimizer.masters()} == {torch.float32}
