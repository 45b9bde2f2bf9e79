"""Master weights with loss scaling: `LossScaler`, the drop-in, and torch's own scaler."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, NAN, loss_of, poison, same, small_model, weights
from tests.torch.masters.helpers import (
    EXACT,
    HALF_DTYPES,
    INNER,
    STORAGES,
    everything,
    give,
    gradients_of,
    half_model,
    values_of,
    wrapped,
)
from tests.torch.versions import needs_grad_dtype
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Static
from gradscale.torch import GradScaler, LossScaler, MasterWeights
from gradscale.torch.masters import Storage
from gradscale.torch.step.apply import StepPlan, decide
from gradscale.torch.step.measure import measure_sizes

SCALE = 1024.0

Step = Callable[[nn.Module, MasterWeights, int, float | None], None]


def by_loss_scaler() -> Step:
    scaler = LossScaler(policy=Static(SCALE))

    def step(model: nn.Module, optimizer: MasterWeights, number: int, bad: float | None) -> None:
        optimizer.zero_grad()
        scaler.backward(torch.ones((), requires_grad=True))
        give(model, number, SCALE)
        if bad is not None:
            poison(next(model.parameters()), bad)
        scaler.step(optimizer)

    return step


def by_grad_scaler(scaler_class: type[torch.amp.GradScaler]) -> Callable[[], Step]:
    def make() -> Step:
        def step(model: nn.Module, optimizer: MasterWeights, number: int, bad: float | None) -> None:
            scaler = scaler_class("cpu", init_scale=SCALE)
            scaler.scale(torch.ones(()))
            give(model, number, SCALE)
            if bad is not None:
                poison(next(model.parameters()), bad)
            scaler.step(optimizer)
            scaler.update()

        return step

    return make


SCALERS = {
    "LossScaler": by_loss_scaler,
    "drop-in": by_grad_scaler(GradScaler),
    "torch": by_grad_scaler(torch.amp.GradScaler),
}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("storage", STORAGES)
def test_scaled_training_is_training_and_a_skipped_step_is_none(storage: Storage, inner: str, scaler: str) -> None:
    model, twin = half_model(), half_model()
    optimizer, plain = wrapped(model, storage, inner), wrapped(twin, storage, inner)
    step = SCALERS[scaler]()
    for number in range(3):
        give(twin, number)
        plain.step()
        step(model, optimizer, number, None)
    assert same(everything(model, optimizer), everything(twin, plain))
    before = everything(model, optimizer)
    for bad in (INF, -INF, NAN):
        step(model, optimizer, 7, bad)
        assert same(everything(model, optimizer), before)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("inner", ["adamw fused", "adamw foreach", "sgd dampened"])
@pytest.mark.parametrize("storage", STORAGES)
def test_training_goes_on_after_a_skip_as_if_there_had_been_none(storage: Storage, inner: str, scaler: str) -> None:
    """Random numbers included, where only the device knows of the skip too."""
    model, twin = half_model(), half_model()
    optimizer, plain = wrapped(model, storage, inner), wrapped(twin, storage, inner)
    step = SCALERS[scaler]()
    for number in range(4):
        give(twin, number)
        plain.step()
        step(model, optimizer, number, INF)
        step(model, optimizer, number, None)
    assert same(everything(model, optimizer), everything(twin, plain))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("storage", STORAGES)
def test_training_goes_on_after_a_skip_where_only_some_groups_are_fused(storage: Storage) -> None:
    """A kernel skips the first group, and the host reads the skip for the second."""

    def made() -> tuple[nn.Module, MasterWeights]:
        model = half_model()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "fused": False}]
        seed = 3 if storage == "stochastic" else None
        return model, MasterWeights(torch.optim.AdamW(groups, lr=1e-2, fused=True), storage, seed=seed)

    (model, optimizer), (twin, plain) = made(), made()
    step = by_loss_scaler()
    for number in range(3):
        give(twin, number)
        plain.step()
        step(model, optimizer, number, INF)
        step(model, optimizer, number, None)
    assert same(everything(model, optimizer), everything(twin, plain))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("storage", STORAGES)
def test_a_skip_that_the_host_has_read_writes_to_no_weight(storage: Storage) -> None:
    model = half_model()
    optimizer = wrapped(model, storage, "rmsprop")
    step = by_loss_scaler()
    step(model, optimizer, 0, None)
    versions = [parameter._version for parameter in model.parameters()]
    step(model, optimizer, 1, INF)
    assert [parameter._version for parameter in model.parameters()] == versions


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("inner", ["sgd fused", "sgd dampened", "adamw fused", "adamw foreach"])
@pytest.mark.parametrize("scaler", SCALERS)
def test_a_first_step_that_is_skipped_leaves_the_optimizer_as_good_as_new(scaler: str, inner: str) -> None:
    model, twin = half_model(), half_model()
    optimizer, plain = wrapped(model, "remainder", inner), wrapped(twin, "remainder", inner)
    step = SCALERS[scaler]()
    step(model, optimizer, 0, INF)
    for number in range(2):
        give(twin, number)
        plain.step()
        step(model, optimizer, number, None)
    assert same(everything(model, optimizer), everything(twin, plain))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("grad_fp32", [False, pytest.param(True, marks=needs_grad_dtype)])
@pytest.mark.parametrize("inner", ["adamw fused", "sgd fused", "adamw foreach"])
@pytest.mark.parametrize("storage", EXACT)
def test_clipping_is_what_it_is_for_float32_parameters(storage: Storage, inner: str, grad_fp32: bool) -> None:
    """The same gradients, the same clip, one model of FP16 weights and one of float32: the masters are the same."""
    model = half_model()
    optimizer = wrapped(model, storage, inner, grad_fp32=grad_fp32)
    twin = copy.deepcopy(model).float()
    plain = INNER[inner](twin.parameters())
    scalers = LossScaler(policy=Static(SCALE)), LossScaler(policy=Static(SCALE))
    for number in range(3):
        norms = []
        for scaler, module, stepped in zip(scalers, (model, twin), (optimizer, plain), strict=True):
            stepped.zero_grad()
            scaler.backward(torch.ones((), requires_grad=True))
            give(module, number, SCALE)
            norms.append(scaler.step(stepped, clip_norm=0.01).grad_norm)
        assert torch.equal(*norms)
        assert norms[0] > 0.01
    # Gradients of an optimizer that is not fused are multiplied there and divided here: they differ by one rounding.
    rtol, atol = (0.0, 0.0) if "fused" in inner else (2.0**-22, 2.0**-28)
    for value, expected in zip(values_of(optimizer), weights(twin), strict=True):
        exact = expected.abs() >= 2.0**-17
        torch.testing.assert_close(value[exact], expected[exact], rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_clipping_without_scaling_rounds_no_gradient(dtype: torch.dtype) -> None:
    model = half_model(dtype)
    optimizer = wrapped(model, inner="sgd fused")
    twin = copy.deepcopy(model).float()
    plain = INNER["sgd fused"](twin.parameters())
    give(model)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None
        other.grad = parameter.grad.float()
    norm = LossScaler(policy=NoScaling()).step(optimizer, clip_norm=0.01).grad_norm
    assert norm is not None
    torch._foreach_div_([other.grad for other in twin.parameters()], norm / 0.01)  # type: ignore[misc]
    plain.step()
    for value, expected in zip(values_of(optimizer), weights(twin), strict=True):
        torch.testing.assert_close(value, expected, rtol=2.0**-22, atol=2.0**-30)


@pytest.mark.parametrize("fused", [None, False, True])
def test_small_gradients_that_fp16_cannot_hold_unscaled_reach_the_masters(fused: bool | None) -> None:
    parameter = nn.Parameter(torch.zeros(3).half())
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0, fused=fused))
    scaler = LossScaler(policy=Static(2.0**16))
    scaler.backward(torch.ones((), requires_grad=True))
    parameter.grad = torch.full((3,), 2.0**-12).half()
    scaler.step(optimizer)
    assert values_of(optimizer)[0].tolist() == [-(2.0**-28)] * 3


@needs_grad_dtype
def test_gradients_are_left_as_they_are_in_16_bits_and_divided_in_float32() -> None:
    for grad_fp32, expected in ((False, 2.0), (True, 2.0 / SCALE)):
        parameter = nn.Parameter(torch.zeros(1).half())
        optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0, fused=True), grad_fp32=grad_fp32)
        scaler = LossScaler(policy=Static(SCALE))
        scaler.backward(torch.ones((), requires_grad=True))
        parameter.grad = torch.full((1,), 2.0, dtype=torch.float32 if grad_fp32 else torch.float16)
        scaler.step(optimizer)
        assert parameter.grad.item() == expected
        assert values_of(optimizer)[0].item() == -2.0 / SCALE


def test_half_parameters_with_masters_are_not_warned_of() -> None:
    model, other = half_model(), nn.Linear(2, 2).half()
    optimizer = wrapped(model)
    scaler = LossScaler([model, other], Static(SCALE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.backward(loss_of_half(model))
        scaler.step(optimizer)
    scaler = LossScaler([model, other], Static(SCALE))
    optimizer.zero_grad()
    scaler.backward(loss_of_half(model) + other(torch.ones(1, 2).half()).sum())
    with pytest.warns(UserWarning, match=r"are FP16: 1\.weight, 1\.bias\."):
        scaler.step(optimizer, torch.optim.SGD(other.parameters(), lr=0.1))


def loss_of_half(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 4).half()).float().square().mean()


def test_fp16_gradients_are_read_once_where_their_division_cannot_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def watched(plan: StepPlan, *arguments: Any) -> Any:
        asked.append(plan.half)
        return decide(plan, *arguments)

    monkeypatch.setattr("gradscale.torch.step.run.decide", watched)
    model = half_model()
    for optimizer, scale in ((wrapped(model), 0.5), (INNER["adagrad fused"](model.parameters()), 2.0)):
        optimizer.zero_grad()
        scaler = LossScaler(policy=Static(scale))
        scaler.backward(loss_of_half(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.step(optimizer, clip_norm=1.0)
    assert asked == [False, False]


@pytest.mark.cpu_only("only the CPU casts in pieces")
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_large_16_bit_gradients_are_measured_piece_by_piece(
    dtype: torch.dtype, bad: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradscale.kernels.torch.CAST_AT_ONCE", 40_000)
    gradients = [torch.randn(elements).to(dtype) for elements in (100_001, 33_000, 40_000, 7)]
    if bad is not None:
        gradients[0][-1] = bad
    sizes = measure_sizes(gradients, torch.device("cpu"), norm=True, amax=False).sizes
    expected = torch.stack([gradient.double().norm() for gradient in gradients]).float()
    torch.testing.assert_close(sizes, expected, rtol=1e-5, atol=0.0, equal_nan=True)


def test_true_gradients_in_fp16_are_refused_with_the_way_out() -> None:
    model = half_model()
    optimizer = wrapped(model)
    scaler = LossScaler(model, Static(SCALE))
    scaler.backward(loss_of_half(model))
    with pytest.raises(
        TypeError, match=r"`clip_value` unscales .* 0\.weight, .*`MasterWeights\(optimizer, grad_fp32=True\)`"
    ):
        scaler.step(optimizer, clip_value=1.0)
    with pytest.raises(TypeError, match="`unscaled` unscales"), scaler.unscaled(optimizer):
        pass
    assert not scaler.step(optimizer).skipped()


def test_a_frozen_parameter_in_fp16_is_not_refused() -> None:
    trained, frozen = nn.Linear(2, 1), nn.Linear(2, 1).half().requires_grad_(False)
    model = nn.ModuleList([trained, frozen])
    optimizer = wrapped(model)
    scaler = LossScaler(model, Static(SCALE))
    scaler.backward(trained(torch.ones(1, 2)).sum())
    with scaler.unscaled(optimizer):
        assert same(gradients_of(model), [torch.ones(1, 2), torch.ones(1)])
    assert not scaler.step(optimizer, clip_value=1.0).skipped()


@needs_grad_dtype
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_the_order_of_torch_works_with_float32_gradients(scaler_class: type[torch.amp.GradScaler]) -> None:
    model = half_model()
    optimizer = wrapped(model, grad_fp32=True)
    scaler = scaler_class("cpu", init_scale=SCALE)
    scaler.scale(loss_of_half(model)).backward()
    scaled = [grad.clone() for grad in gradients_of(model)]
    scaler.unscale_(optimizer)
    assert same([grad * SCALE for grad in gradients_of(model)], scaled)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = weights(model)
    scaler.step(optimizer)
    scaler.update()
    assert not same(weights(model), before)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_unscale_refuses_fp16_gradients_and_names_the_way_out() -> None:
    model = half_model()
    optimizer = wrapped(model)
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(loss_of_half(model)).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
        scaler.unscale_(optimizer)
    assert "`gradscale.torch.MasterWeights(optimizer, grad_fp32=True)`" in caught.value.__notes__[0]


@needs_grad_dtype
def test_clipping_by_value_and_edits_work_with_float32_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(2).half())
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0), grad_fp32=True)
    scaler = LossScaler(policy=Static(SCALE))
    scaler.backward((parameter.float() * torch.tensor([3.0, 0.5])).sum())
    with scaler.unscaled(optimizer):
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)
    scaler.step(optimizer, clip_value=2.0)
    assert parameter.tolist() == [-2.0, -1.0]


def test_a_step_of_two_optimizers_one_with_masters_is_all_or_none() -> None:
    half, wide = half_model(), small_model(1)
    optimizer, other = wrapped(half), torch.optim.SGD(wide.parameters(), lr=0.1)
    scaler = LossScaler([half, wide], Dynamic(init_scale=SCALE))
    for bad in (None, INF):
        before = weights(half, wide)
        scaler.backward(loss_of_half(half) + loss_of(wide))
        if bad is not None:
            poison(wide[0].weight, bad)
        result = scaler.step(optimizer, other, clip_norm=1.0)
        optimizer.zero_grad()
        other.zero_grad()
        assert result.skipped() is (bad is not None)
        assert same(weights(half, wide), before) is (bad is not None)


def test_stale_gradients_are_detected() -> None:
    model = half_model()
    optimizer = wrapped(model)
    scaler = LossScaler(model, Static(SCALE))
    scaler.backward(loss_of_half(model))
    scaler.step(optimizer)
    scaler.backward(loss_of_half(model))
    with pytest.raises(RuntimeError, match="Gradients from before the last step are still there"):
        scaler.step(optimizer)
