"""`MasterWeights.step`: float32 arithmetic for 16-bit parameters, whatever the inner optimizer."""

import copy
import weakref
from typing import Any

import pytest
import torch
from tests.torch.helpers import same, small_model, weights
from tests.torch.masters.helpers import (
    EXACT,
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
from torch import Tensor, nn

from gradscale import Static
from gradscale.torch import LossScaler, MasterWeights
from gradscale.torch.masters import Storage
from gradscale.torch.masters import optimizer as module


def float32_twin(model: nn.Module, inner: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a float32 model that starts from the same numbers, and its optimizer."""
    twin = copy.deepcopy(model).float()
    return twin, INNER[inner](twin.parameters())


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("storage", EXACT)
def test_masters_are_the_weights_of_float32_training_bit_exactly(
    storage: Storage, dtype: torch.dtype, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ON_CPU", 20)  # several parts, one of them larger than that
    model = half_model(dtype)
    optimizer = wrapped(model, storage, inner)
    twin, plain = float32_twin(model, inner)
    for step in range(5):
        give(model, step)
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.float()
        optimizer.step()
        plain.step()
    in_range = [value.abs() >= 2.0**-17 for value in weights(twin)]
    for value, expected, mask in zip(values_of(optimizer), weights(twin), in_range, strict=True):
        assert torch.equal(value[mask], expected[mask])
    assert same(weights(model), [value.to(dtype) for value in values_of(optimizer)])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_updates_below_half_a_unit_add_up(storage: Storage, dtype: torch.dtype) -> None:
    """Many updates, none of which a 16-bit weight of 1 could see, move it by an eighth."""
    update, steps = 2.0**-12, 2**9

    def trained(wrap: Any) -> float:
        parameter = nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = wrap(torch.optim.SGD([parameter], lr=update))
        parameter.grad = torch.full_like(parameter, -1.0)
        for _ in range(steps):
            optimizer.step()
        return parameter.float().mean().item()

    assert trained(lambda optimizer: optimizer) == 1.0
    seed = 0 if storage == "stochastic" else None
    found = trained(lambda optimizer: MasterWeights(optimizer, storage, seed=seed))
    assert found == pytest.approx(1.125, abs=0.02 if storage == "stochastic" else 0.0)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_model_learns_where_one_of_plain_half_weights_stalls(storage: Storage) -> None:
    """A linear problem with a small learning rate, in BF16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    y = x @ torch.randn(8, 1, generator=generator)

    def loss_after(wrap: Any) -> float:
        torch.manual_seed(1)
        model = nn.Linear(8, 1, bias=False)
        model.weight.data.fill_(3.0)
        model = model.bfloat16()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=5e-3))
        for _ in range(600):
            loss = nn.functional.mse_loss(x @ model.weight.float().T, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return nn.functional.mse_loss(x @ model.weight.float().T, y).item()

    plain = loss_after(lambda optimizer: optimizer)
    seed = 0 if storage == "stochastic" else None
    assert loss_after(lambda optimizer: MasterWeights(optimizer, storage, seed=seed)) < 0.1 * plain


@pytest.mark.parametrize("storage", STORAGES)
def test_other_parameters_are_stepped_as_ever(storage: Storage) -> None:
    def run(wrap: bool) -> Tensor:
        wide = nn.Parameter(torch.linspace(-1, 1, 10))
        half = nn.Parameter(torch.linspace(-1, 1, 6).half())
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([wide, half], lr=0.1, fused=True)
        if wrap:
            optimizer = MasterWeights(optimizer, storage)
            assert [value.dtype for _, value in optimizer.masters()] == [torch.float32] * 2
        for step in range(3):
            wide.grad, half.grad = torch.full_like(wide, step + 1.0), torch.ones_like(half)
            optimizer.step()
        return wide.detach()

    assert torch.equal(run(wrap=True), run(wrap=False))


def test_parameters_without_gradients_are_left_alone() -> None:
    model = half_model()
    optimizer = wrapped(model)
    before = weights(model)
    give(model)
    first(model).grad = None
    optimizer.step()
    after = weights(model)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    assert len(optimizer.state) == 3


def test_fused_sgd_takes_gradients_that_come_later_than_those_of_others() -> None:
    """torch's own raises in its first step with momentum for some parameters of a group and none for others."""
    model, twin = half_model(), half_model()
    optimizer, expected = (
        wrapped(model, inner="sgd fused"),
        MasterWeights(torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)),
    )
    for step in range(3):
        for each, stepped in ((model, optimizer), (twin, expected)):
            give(each, step)
            if step == 0:
                first(each).grad = None
            stepped.step()
    for value, other in zip(values_of(optimizer), values_of(expected), strict=True):
        torch.testing.assert_close(value, other, rtol=2.0**-20, atol=2.0**-24)


def test_a_tied_parameter_has_one_master() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model[1].weight = model[0].weight
    optimizer = wrapped(model)
    give(model)
    optimizer.step()
    assert len(list(optimizer.masters())) == 3
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize("storage", STORAGES)
def test_a_group_added_later_is_stepped_with_its_own_settings(storage: Storage) -> None:
    model, late = half_model(), nn.Linear(3, 3).half()
    optimizer = wrapped(model, storage, "sgd fused")
    optimizer.add_param_group({"params": late.parameters(), "lr": 0.0})
    give(model)
    give(late)
    before = weights(late)
    optimizer.step()
    assert same(weights(late), before)
    optimizer.param_groups[1]["lr"] = 1.0
    optimizer.step()
    assert not same(weights(late), before)
    assert [len(group["params"]) for group in optimizer.optimizer.param_groups] == [4, 2]


def test_schedulers_change_what_the_inner_optimizer_uses() -> None:
    parameter = nn.Parameter(torch.zeros(2).half())
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert parameter.tolist() == [-1.75, -1.75]
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    model = half_model()
    optimizer = wrapped(model)
    before = weights(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4).half()).float().square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert not same(weights(model), before)


@pytest.mark.not_simulated("sparse tensors")
def test_sparse_gradients_stay_sparse() -> None:
    embedding = nn.Embedding(5, 3, sparse=True).half()
    before = embedding.weight.detach().clone()
    optimizer = MasterWeights(torch.optim.SGD(embedding.parameters(), lr=1.0))
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    moved = (before - embedding.weight.detach()).float()
    assert moved[[0, 2, 4]].count_nonzero() == 0
    assert torch.allclose(moved[[1, 3]], torch.tensor([[2.0], [1.0]]).expand(2, 3), atol=2e-3)


@pytest.mark.not_simulated("sparse tensors")
@pytest.mark.parametrize("scale", [None, 16.0])
def test_duplicates_of_a_sparse_16_bit_gradient_are_added_up_in_float32(scale: float | None) -> None:
    embedding = nn.Embedding(2, 1, sparse=True).bfloat16()
    nn.init.zeros_(embedding.weight)
    optimizer = MasterWeights(torch.optim.SGD(embedding.parameters(), lr=1.0))
    loss = (embedding(torch.tensor([0, 0, 0])).flatten() * torch.tensor([256.0, 1.0, 1.0])).sum()
    if scale is None:
        loss.backward()
        optimizer.step()
    else:
        scaler = LossScaler(embedding, Static(scale))
        scaler.backward(loss)
        assert scaler.step(optimizer, norm=True).grad_norm == 258
    # The nearest BF16 numbers to 257 and 258 are 256 and 258: one by one, the ones would be lost.
    ((_, master),) = optimizer.masters()
    assert master.flatten().tolist() == [-258.0, 0.0]


def test_channels_last_weights_are_updated_in_their_own_layout() -> None:
    plain = nn.Conv2d(3, 4, 3).half()
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for convolution in (plain, other):
        optimizer = wrapped(convolution)
        for parameter in convolution.parameters():
            grad = torch.arange(parameter.numel()).reshape(parameter.shape).half() / 64
            parameter.grad = grad
        optimizer.step()
    assert other.weight.stride() != plain.weight.stride()
    assert same(weights(other), weights(plain))


class Counting(torch.optim.SGD):
    """A third-party optimizer that counts its steps in the group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("storage", STORAGES)
def test_an_unknown_optimizer_is_stepped_once_and_may_change_its_settings(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ON_CPU", 1)
    model = half_model()
    optimizer = MasterWeights(Counting(model.parameters(), lr=0.1), storage)
    for step in range(3):
        give(model, step)
        optimizer.step()
    assert optimizer.param_groups[0]["steps"] == 3


def test_hooks_run_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ON_CPU", 1)
    model, calls = half_model(), []
    optimizer = wrapped(model)
    optimizer.register_step_post_hook(lambda *_: calls.append("outer"))
    optimizer.optimizer.register_step_post_hook(lambda *_: calls.append("inner"))
    give(model)
    optimizer.step()
    assert sorted(calls) == ["inner", "outer"]


@needs_grad_dtype
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_gradients_are_accumulated_in_float32_if_asked(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0), grad_fp32=True)
    for value in [1.0, *[2.0**-12] * 16]:
        (parameter * torch.full((1,), value, dtype=dtype)).backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype is torch.float32
    assert parameter.grad.item() == 1.0 + 2.0**-8
    optimizer.step()
    assert values_of(optimizer)[0].item() == -(2.0**-8)


@needs_grad_dtype
def test_float32_gradients_are_used_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half_model()
    optimizer = wrapped(model, grad_fp32=True)
    give(model)
    given, stepped = gradients_of(model), []
    step = optimizer.optimizer.step

    def noted() -> None:
        stepped.extend(each.grad for group in optimizer.optimizer.param_groups for each in group["params"])
        step()

    monkeypatch.setattr(optimizer.optimizer, "step", noted)
    optimizer.step()
    assert all(one is other for one, other in zip(stepped, given, strict=True))


@needs_grad_dtype
def test_float32_gradients_in_another_layout_are_used_as_they_should_be() -> None:
    model, twin = half_model(), half_model()
    optimizers = [wrapped(each, grad_fp32=True) for each in (model, twin)]
    for each in (model, twin):
        give(each)
    weight = first(twin)
    assert weight.grad is not None
    weight.grad = weight.grad.T.contiguous().T
    assert weight.grad.stride() != weight.stride()
    for optimizer in optimizers:
        optimizer.step()
    assert same(weights(twin), weights(model))


@pytest.mark.not_simulated("memory: operators that write to an `out` have a copy of it")
@pytest.mark.parametrize("storage", STORAGES)
def test_no_temporary_is_used_beyond_its_part_of_the_step_nor_is_as_large_as_the_model(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ON_CPU", 40)
    model = half_model()
    optimizer = wrapped(model, storage)
    give(model)
    made: list[weakref.ref[Tensor]] = []
    largest, empty_like = 0, torch.empty_like

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal largest
        tensor = empty_like(*args, **kwargs)
        if tensor.dtype is torch.float32:
            made.append(weakref.ref(tensor))
            largest = max(largest, sum(each.numel() for ref in made if (each := ref()) is not None))
        return tensor

    monkeypatch.setattr(torch, "empty_like", noted)
    optimizer.step()
    inner = [master for group in optimizer.optimizer.param_groups for master in group["params"]]
    assert all(master.grad is None for master in inner)
    assert sum(master.numel() for master in inner) == (58 if storage == "fp32" else 0)
    assert made
    assert not [ref for ref in made if ref() is not None]
    # The gradients of one part, and where they are computed its values.
    assert largest <= (40 if storage == "fp32" else 80)


def test_an_error_of_the_inner_optimizer_leaves_the_optimizer_whole() -> None:
    model = half_model()
    optimizer = wrapped(model, "remainder")
    give(model)
    before = everything(model, optimizer)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert same(everything(model, optimizer), before)
    assert len(optimizer.optimizer.param_groups[0]["params"]) == 4
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()


def test_an_optimizer_that_has_stepped_already_goes_on_with_float32_state() -> None:
    model = half_model()
    inner = INNER["adamw foreach"](model.parameters())
    give(model)
    inner.step()
    moments = [state["exp_avg"].clone() for state in inner.state.values()]
    optimizer = MasterWeights(inner)
    assert same([state["exp_avg"] for state in optimizer.state.values()], [moment.float() for moment in moments])
    optimizer.step()
    assert all(state["exp_avg"].dtype is torch.float32 for state in optimizer.state.values())
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_what_cannot_be_wrapped_is_refused_and_left_as_it_is() -> None:
    model = half_model()
    with pytest.raises(TypeError, match=r"must be a torch optimizer .* Received: Sequential\."):
        MasterWeights(model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LBFGS evaluates the loss itself"):
        MasterWeights(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="keeps masters already"):
        MasterWeights(wrapped(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"`storage` must be one of 'fp32', .* Received: storage='fp16'\."):
        MasterWeights(optimizer, "fp16")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"`seed` is for storage='stochastic'.* Received: seed=1 with storage='kahan'\."
    ):
        MasterWeights(optimizer, "kahan", seed=1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="A scheduler has been built on this optimizer"):
        MasterWeights(optimizer)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


class Closed(torch.optim.SGD):
    """An optimizer that takes no groups after it was built."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "built", False):
            raise RuntimeError("no more groups")
        super().add_param_group(param_group)


def test_an_optimizer_that_takes_no_more_groups_can_be_wrapped_and_a_group_it_refuses_is_not_added() -> None:
    model, late = half_model(), nn.Linear(3, 3).half()
    inner = Closed([{"params": [parameter], "lr": 0.1} for parameter in model.parameters()])
    inner.built = True  # type: ignore[attr-defined]
    optimizer = MasterWeights(inner)
    with pytest.raises(RuntimeError, match="no more groups"):
        optimizer.add_param_group({"params": late.parameters()})
    assert [group["params"] for group in optimizer.param_groups] == [[parameter] for parameter in model.parameters()]
    give(model)
    before = weights(model)
    optimizer.step()
    assert not same(weights(model), before)
    assert len(list(optimizer.masters())) == 4


@needs_grad_dtype
def test_gradients_that_are_there_become_float32_where_that_is_asked_for() -> None:
    model = half_model()
    give(model)
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    wrapped(model, grad_fp32=True)
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert {grad.dtype for grad in after} == {torch.float32}
    assert same(after, [grad.float() for grad in before])


def test_a_float32_model_needs_no_masters() -> None:
    model = small_model()
    optimizer = wrapped(model)
    give(model)
    optimizer.step()
    assert all(parameter is value for parameter, value in optimizer.masters())
