"""Saving, loading and copying masters, and weights that other code has written to."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import same, weights
from tests.torch.masters.helpers import (
    HALF_DTYPES,
    INNER,
    STORAGES,
    everything,
    first,
    give,
    gradients_of,
    half_model,
    values_of,
    wrapped,
)
from tests.torch.versions import needs_grad_dtype
from torch import nn

from gradscale.torch import MasterWeights
from gradscale.torch.masters import Storage


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give(model, step)
        optimizer.step()


def through_a_file(*saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_resumed_run_goes_on_bit_exactly(storage: Storage, dtype: torch.dtype, model_first: bool) -> None:
    model = half_model(dtype)
    optimizer = wrapped(model, storage)
    train(model, optimizer, range(5))
    of_model, of_optimizer = through_a_file(model.state_dict(), optimizer.state_dict())
    train(model, optimizer, range(5, 10))

    resumed = half_model(dtype, seed=9)
    other = wrapped(resumed, storage)
    loads = [lambda: resumed.load_state_dict(of_model), lambda: other.load_state_dict(of_optimizer)]
    for load in loads if model_first else reversed(loads):
        load()
    train(resumed, other, range(5, 10))
    assert same(everything(resumed, other), everything(model, optimizer))


@pytest.mark.parametrize("storage", STORAGES)
def test_what_was_loaded_can_be_saved_again_before_any_step(storage: Storage) -> None:
    model = half_model()
    optimizer = wrapped(model, storage)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    other = wrapped(copy.deepcopy(model), storage)
    other.load_state_dict(copy.deepcopy(saved))
    again = other.state_dict()
    assert again["state"].keys() == saved["state"].keys() == {0, 1, 2, 3}
    for name in ("master", "exp_avg"):
        assert same(
            [entry[name] for entry in again["state"].values()], [each[name] for each in saved["state"].values()]
        )


@pytest.mark.parametrize("storage", STORAGES)
def test_masters_without_state_of_the_inner_optimizer_are_saved_and_it_still_starts_a_state(storage: Storage) -> None:
    model = half_model()
    optimizer = wrapped(model, storage)
    optimizer.refine({weight: weight.detach().float() * (1 + 2.0**-13) for weight in model.parameters()})
    saved = through_a_file(optimizer.state_dict())[0]
    assert saved["state"] == {}
    twin = copy.deepcopy(model)
    other, plain = wrapped(twin, storage), INNER["adamw fused"](copy.deepcopy(model).parameters())
    plain.load_state_dict(saved)
    other.load_state_dict(saved)
    assert same(values_of(other), values_of(optimizer))
    train(model, optimizer, range(2))
    train(twin, other, range(2))
    assert same(everything(twin, other), everything(model, optimizer))
    assert not plain.state


@pytest.mark.parametrize("storage", STORAGES)
def test_a_plain_optimizers_state_is_loaded_and_masters_are_made_of_the_weights(storage: Storage) -> None:
    model = half_model()
    plain = INNER["adamw fused"](model.parameters())
    train(model, plain, range(3))
    optimizer = wrapped(model, storage)
    train(model, optimizer, range(3, 5))
    optimizer.load_state_dict(
        {**plain.state_dict(), "param_groups": [{**plain.state_dict()["param_groups"][0], "lr": 0.5}]}
    )
    assert same(values_of(optimizer), [weight.float() for weight in weights(model)])
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_a_plain_optimizer_can_load_what_was_saved() -> None:
    model = half_model()
    optimizer = wrapped(model)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model).float()
    plain = INNER["adamw fused"](twin.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert same(
        [state["exp_avg"] for state in plain.state.values()], [state["exp_avg"] for state in optimizer.state.values()]
    )


def test_one_storage_can_load_what_another_has_saved() -> None:
    model = half_model(torch.bfloat16)
    optimizer = wrapped(model, "fp32")
    train(model, optimizer, range(4))
    for storage in STORAGES:
        other = wrapped(copy.deepcopy(model), storage)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for found, expected in zip(values_of(other), values_of(optimizer), strict=True):
            bits = {"fp32": 24, "remainder": 24, "kahan": 16, "stochastic": 8}[storage]
            assert ((found - expected).abs() <= expected.abs() * 2.0**-bits).all()


def test_loading_never_writes_to_the_model_and_a_master_of_another_weight_is_not_used() -> None:
    model = half_model()
    optimizer = wrapped(model)
    train(model, optimizer, range(3))
    other = half_model(seed=5)
    before = weights(other)
    tuned = wrapped(other)
    tuned.load_state_dict(optimizer.state_dict())
    assert same(weights(other), before)
    assert same(values_of(tuned), [weight.float() for weight in before])


READS: dict[str, Callable[[MasterWeights], Any]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "masters": values_of,
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("storage", STORAGES)
def test_masters_that_were_loaded_outlast_a_read_before_the_model_is_loaded(storage: Storage, read: str) -> None:
    model = half_model()
    optimizer = wrapped(model, storage)
    train(model, optimizer, range(3))
    twin = half_model(seed=5)
    other = wrapped(twin, storage)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    READS[read](other)
    twin.load_state_dict(model.state_dict())
    assert same(values_of(other), values_of(optimizer))
    train(model, optimizer, range(3, 5))
    train(twin, other, range(3, 5))
    assert same(everything(twin, other), everything(model, optimizer))


@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_copy_made_before_the_model_is_loaded_has_the_loaded_masters(storage: Storage, method: str) -> None:
    model = half_model()
    optimizer = wrapped(model, storage)
    train(model, optimizer, range(3))
    fresh = half_model(seed=5)
    loaded = wrapped(fresh, storage)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair = (fresh, loaded)
    twin, other = copy.deepcopy(pair) if method == "deepcopy" else pickle.loads(pickle.dumps(pair))
    twin.load_state_dict(model.state_dict())
    train(model, optimizer, range(3, 5))
    train(twin, other, range(3, 5))
    assert same(everything(twin, other), everything(model, optimizer))


def test_reading_while_the_weights_are_swapped_for_others_loses_nothing() -> None:
    model = half_model()
    optimizer = wrapped(model)
    train(model, optimizer, range(3))
    expected = values_of(optimizer)
    mine, average = copy.deepcopy(model.state_dict()), half_model(seed=4).state_dict()
    model.load_state_dict(average)
    assert same(values_of(optimizer), [weight.float() for weight in average.values()])
    optimizer.state_dict()
    copy.deepcopy((model, optimizer))
    model.load_state_dict(mine)
    assert same(values_of(optimizer), expected)


def test_a_state_that_does_not_fit_is_refused_with_nothing_changed() -> None:
    model = half_model()
    optimizer = wrapped(model)
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    saved = optimizer.state_dict()
    del saved["state"][2]["master"]
    with pytest.raises(ValueError, match=r"Parameter 2 has shape \(2, 8\), and its saved master None\."):
        optimizer.load_state_dict(saved)
    saved["masters"]["version"] = 2
    with pytest.raises(ValueError, match=r"must be of version 1\. Received: version=2\."):
        optimizer.load_state_dict(saved)
    with pytest.raises(TypeError, match=r"must be a dict, .* Received: int\."):
        optimizer.load_state_dict(saved | {"masters": 5})
    for values in (3, {0: "x"}, None):
        with pytest.raises(
            ValueError, match=r"must have `values`, a dict of tensors.* Received: version: int, values: "
        ):
            optimizer.load_state_dict(saved | {"masters": {"version": 1, "values": values, "storage_state": {}}})
    with pytest.raises(ValueError, match=r"must have `values`"):
        optimizer.load_state_dict(saved | {"masters": {"version": 1}})
    assert same(everything(model, optimizer), before)


def test_hooks_of_saving_and_loading_are_called() -> None:
    model, calls = half_model(), []
    optimizer = wrapped(model)
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [1, "loaded"]


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_that_somebody_has_written_are_taken_over(storage: Storage) -> None:
    model = half_model()
    optimizer = wrapped(model, storage)
    train(model, optimizer, range(3))
    with torch.no_grad():
        first(model).fill_(0.25)
    assert values_of(optimizer)[0].unique().tolist() == [0.25]
    first(model).data = torch.full_like(first(model), 0.5)
    assert values_of(optimizer)[0].unique().tolist() == [0.5]
    first(model).data.fill_(0.125)  # torch does not count this one
    optimizer.sync_from_model()
    assert values_of(optimizer)[0].unique().tolist() == [0.125]
    give(model, 3)
    optimizer.step()
    assert (values_of(optimizer)[0] - 0.125).abs().max() < 0.05


def test_weights_swapped_for_others_and_back_lose_nothing_with_full_masters() -> None:
    model = half_model()
    optimizer = wrapped(model)
    train(model, optimizer, range(3))
    expected = values_of(optimizer)
    mine, average = copy.deepcopy(model.state_dict()), half_model(seed=4).state_dict()
    model.load_state_dict(average)
    model.load_state_dict(mine)
    assert same(values_of(optimizer), expected)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
def test_a_copy_continues_like_the_original_and_shares_nothing_with_it(storage: Storage, method: str) -> None:
    model = half_model()
    optimizer = wrapped(model, storage)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, range(3))
    pair = (model, optimizer)
    twin, other = copy.deepcopy(pair) if method == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert isinstance(other, MasterWeights)
    assert [id(parameter) for parameter in twin.parameters()] == [id(each) for each in other.param_groups[0]["params"]]
    before = everything(model, optimizer)
    train(twin, other, range(3, 6))
    assert same(everything(model, optimizer), before)
    train(model, optimizer, range(3, 6))
    assert same(everything(twin, other), everything(model, optimizer))
    scheduler.step()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_copy_knows_of_weights_that_were_written_before(storage: Storage) -> None:
    model = half_model()
    optimizer = wrapped(model, storage)
    train(model, optimizer, range(3))
    with torch.no_grad():
        first(model).fill_(0.25)
    _, other = copy.deepcopy((model, optimizer))
    assert values_of(other)[0].unique().tolist() == [0.25]


@needs_grad_dtype
def test_a_copy_accumulates_in_float32_if_the_original_did() -> None:
    model = half_model()
    twin, other = copy.deepcopy((model, wrapped(model, grad_fp32=True)))
    twin(torch.ones(1, 4).half()).sum().backward()
    assert {grad.dtype for grad in gradients_of(twin)} == {torch.float32}
    other.step()


def test_the_seed_decides_what_stochastic_rounding_does_and_that_of_torch_does_not() -> None:
    def run(seed: int | None, of_torch: int = 0) -> list[torch.Tensor]:
        model = half_model(torch.bfloat16)
        torch.manual_seed(of_torch)
        optimizer = MasterWeights(INNER["sgd fused"](model.parameters()), "stochastic", seed=seed)
        train(model, optimizer, range(4))
        return weights(model)

    assert same(run(1), run(1, of_torch=5))
    assert not same(run(1), run(2))
    # Ranks that hold replicas are usually seeded differently.
    assert same(run(None, of_torch=100), run(None, of_torch=101))
