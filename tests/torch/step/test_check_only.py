"""`CheckOnly`: a BF16 run whose steps are checked, and nothing else."""

from typing import Any

import pytest
import torch
from benchmarks.traffic import Traffic
from tests.torch.drop_in.helpers import grad_of
from tests.torch.helpers import (
    INF,
    NAN,
    OPTIMIZERS,
    all_finite,
    loss_of,
    poison,
    same,
    small_model,
    state_tensors,
    weights,
)
from torch import Tensor, nn

from gradscale import CheckOnly
from gradscale.torch import GradScaler, LossScaler, MasterWeights

pytestmark = pytest.mark.usefixtures("either_way")


class WithLossScaler:
    """A loop with `LossScaler`."""

    def __init__(self, model: nn.Module) -> None:
        self.scaler = LossScaler(model, "check_only")

    def backward(self, loss: Tensor) -> None:
        self.scaler.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.scaler.step(optimizer)


class WithGradScaler:
    """A loop with the drop-in."""

    def __init__(self, model: nn.Module) -> None:
        self.scaler = GradScaler(torch.get_default_device().type, policy=CheckOnly())

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.last


LOOPS = (WithLossScaler, WithGradScaler)


@pytest.mark.parametrize("loop_of", LOOPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clean_steps_are_those_without_a_scaler_bit_for_bit(loop_of: Any, name: str) -> None:
    model, plain = small_model(), small_model()
    optimizer, its_optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    loop = loop_of(model)
    for seed in range(4):
        loop.backward(loss_of(model, seed))
        assert not loop.step(optimizer).skipped()
        loss_of(plain, seed).backward()
        its_optimizer.step()
        optimizer.zero_grad()
        its_optimizer.zero_grad()
    assert same(weights(model), weights(plain))
    assert same(state_tensors(optimizer), state_tensors(its_optimizer))


@pytest.mark.parametrize("loop_of", LOOPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_one_bad_gradient_reaches_neither_weights_nor_moments(loop_of: Any, name: str, bad: float) -> None:
    model = small_model()
    optimizer = OPTIMIZERS[name](model.named_parameters())
    loop = loop_of(model)
    for seed in range(3):
        loop.backward(loss_of(model, seed))
        if seed == 1:
            poison(model[0].weight, bad)
        before = weights(model)
        result = loop.step(optimizer)
        assert result.skipped() == (seed == 1)
        assert same(weights(model), before) == (seed == 1)
        if seed == 1:
            assert [culprit.name for culprit in result.culprits()] == ["0.weight"]
        optimizer.zero_grad()
    assert all_finite(weights(model) + state_tensors(optimizer))


@pytest.mark.cpu_only("an accelerator counts the update of a fused kernel otherwise")
@pytest.mark.parametrize("loop_of", LOOPS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_the_gradients_are_read_once_more_than_by_the_optimizer_and_never_written(loop_of: Any, fused: bool) -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused, foreach=not fused)
    loop = loop_of(model)

    def made() -> Tensor:
        optimizer.zero_grad()
        loop.backward(model(torch.randn(2, 256)).sum())
        return grad_of(model.weight)

    made()
    loop.step(optimizer)  # the first step of a run also reads the largest magnitude, for the metrics
    grad = made()
    before = grad.clone()
    with Traffic([grad]) as traffic:
        loop.step(optimizer)
    assert traffic.passes_read == 2  # the check and the update
    assert same([grad], [before])
    written = {name for name, bytes in traffic.by_operator.items() if bytes.written}
    assert not written - {"_fused_sgd_"}  # its schema may write, where it has a `grad_scale`: it has none


class Recorded(torch.optim.SGD):
    """Notes what its fused kernel is told to divide by."""

    divisors: list[Any]

    def step(self, closure: Any = None) -> Any:
        self.divisors.append(getattr(self, "grad_scale", None))
        return super().step(closure)


@pytest.mark.parametrize("loop_of", LOOPS)
def test_a_fused_kernel_is_given_nothing_to_divide_by(loop_of: Any) -> None:
    model = small_model()
    optimizer = Recorded(model.parameters(), lr=0.1, fused=True)
    optimizer.divisors = []
    loop = loop_of(model)
    loop.backward(loss_of(model))
    assert not loop.step(optimizer).skipped()
    assert optimizer.divisors == [None]


@pytest.mark.parametrize("loop_of", LOOPS)
def test_the_loss_is_not_multiplied(loop_of: Any) -> None:
    scaler = loop_of(small_model()).scaler
    leaf = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    loss = leaf * 2
    with Traffic() as traffic:
        scaled = scaler.scale(loss)
    assert scaled.dtype is torch.bfloat16
    assert scaled.data_ptr() == loss.data_ptr()
    assert not {name for name in traffic.by_operator if "mul" in name}


@pytest.mark.parametrize("loop_of", LOOPS)
def test_bf16_weights_and_gradients_are_checked_too(loop_of: Any) -> None:
    model = small_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = loop_of(model)
    for seed, bad in enumerate((None, INF)):
        loop.backward(model(torch.randn(2, 4, dtype=torch.bfloat16)).sum())
        if bad:
            poison(model[0].weight, bad)
        assert loop.step(optimizer).skipped() == bool(seed)
        optimizer.zero_grad()
    assert all_finite(weights(model))


@pytest.mark.parametrize("loop_of", LOOPS)
def test_masters_are_protected(loop_of: Any) -> None:
    model = small_model().bfloat16()
    optimizer = MasterWeights(torch.optim.Adam(model.parameters(), fused=True))
    loop = loop_of(model)
    for bad in (None, NAN, None):
        loop.backward(model(torch.randn(2, 4, dtype=torch.bfloat16)).sum())
        if bad is not None:
            poison(model[0].weight, bad)
        assert loop.step(optimizer).skipped() == (bad is not None)
        optimizer.zero_grad()
    assert all_finite(weights(model))


def test_clipping_and_edits_work_as_with_a_scale() -> None:
    model, plain = small_model(), small_model()
    optimizer, its_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    scaler = LossScaler(model, CheckOnly())
    scaler.backward(loss_of(model))
    with scaler.unscaled(optimizer):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    result = scaler.step(optimizer, clip_norm=0.01)
    loss_of(plain).backward()
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    its_optimizer.step()
    assert result.grad_norm is not None
    for one, other in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(one, other)


def test_the_drop_in_unscales_nothing_and_checks_before_the_clip() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(torch.get_default_device().type, policy="check_only")
    scaler.scale(loss_of(model)).backward()
    poison(model[0].weight)
    before = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    scaler.unscale_(optimizer)
    assert same([each.grad for each in model.parameters() if each.grad is not None], before)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last is not None
    assert scaler.last.skipped()
    assert scaler.get_scale() == 1.0


def test_the_scale_of_the_drop_in_cannot_be_set() -> None:
    scaler = GradScaler(torch.get_default_device().type, policy="check_only")
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    with pytest.raises(ValueError, match="must be from 1 to 1"):
        scaler.update(1024.0)


def test_the_drop_in_loads_what_it_saved_and_what_torchs_saved() -> None:
    kind = torch.get_default_device().type
    scaler = GradScaler(kind, policy="check_only")
    loaded = GradScaler(kind, policy="check_only")
    loaded.load_state_dict(scaler.state_dict())
    assert loaded.get_scale() == 1.0
    loaded.load_state_dict(torch.amp.GradScaler(kind, init_scale=512.0).state_dict() | {"scale": 512.0})
    assert loaded.get_scale() == 1.0
    assert loaded.state_dict()["scale"] == 1.0
