"""With finite gradients, a scaled run is the unscaled one: by how many roundings they differ, for every optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.torch.helpers import OPTIMIZERS, autocast, loss_of, small_model
from torch import Tensor, nn

from gradscale import Dynamic, Policy, Static
from gradscale.policies.headroom import Headroom
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")

STEPS = 10
CLIP = 0.05


def wide_model() -> nn.Sequential:
    """Has a gradient large enough for `dot` and others for the multi-tensor norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8192), nn.Tanh(), nn.Linear(8192, 2))


def trained(
    make: Callable[[Any], torch.optim.Optimizer], policy: Policy | None, clip: float | None, *, wide: bool = False
) -> list[Tensor]:
    """Returns the weights after training with a scale, or in plain float32. Only the last step is clipped."""
    model = wide_model() if wide else small_model()
    optimizer = make(model.parameters())
    scaler = None if policy is None else LossScaler(model, policy)
    for step in range(STEPS):
        loss, bound = loss_of(model, step), clip if step == STEPS - 1 else None
        if scaler is None:
            loss.backward()
            if bound is not None:
                nn.utils.clip_grad_norm_(model.parameters(), bound)
            optimizer.step()
        else:
            scaler.backward(loss)
            scaler.step(optimizer, clip_norm=bound)
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def worst_ulps(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference, in units in the last place of the largest weight of each tensor."""
    return max(
        float((one - other).abs().max() / (other.abs().max() * torch.finfo(other.dtype).eps))
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "policy", [Static(2.0**16), Dynamic(growth_interval=2), Headroom()], ids=lambda p: type(p).__name__
)
def test_without_clipping_the_weights_are_the_same_to_the_last_bit(name: str, policy: Policy) -> None:
    make = OPTIMIZERS[name]
    assert worst_ulps(trained(make, policy, None), trained(make, None, None)) == 0


# Later steps would compare two trajectories, and Adam turns one rounding of a gradient near zero into many of a weight.
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wide", [False, True], ids=["small", "wide"])
def test_a_clipped_step_differs_by_at_most_one_rounding(name: str, wide: bool) -> None:
    make = OPTIMIZERS[name]
    found, expected = trained(make, Static(2.0**16), CLIP, wide=wide), trained(make, None, CLIP, wide=wide)
    assert worst_ulps(found, expected) <= 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [2.0**16, 1000.0, 1e-3])
def test_one_clipped_gradient_is_within_the_roundings_of_its_factor_of_the_exact_one(fused: bool, scale: float) -> None:
    # The scaled gradient, the sum under the quotient, the quotient, the reciprocal of the scale, their product, and the
    # product with the gradient; a fused kernel divides by the reciprocal of the factor instead, which is one more.
    roundings = 7 if fused else 6
    weight = nn.Parameter(torch.zeros(1000))
    grad = torch.randn(1000)
    scaler = LossScaler(policy=Static(scale))
    scaler.backward((weight * grad).sum())
    result = scaler.step(torch.optim.SGD([weight], lr=1.0, fused=fused), clip_norm=1.0)
    assert result.grad_norm is not None
    exact = grad.double() / (result.grad_norm.double() + 1e-6)
    assert weight.grad is not None
    relative = ((weight.grad.double() - exact) / exact).abs().max().item()
    assert relative <= (roundings + 0.01) * torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("name", ["adamw fused", "sgd foreach"])
def test_accumulated_micro_batches_give_the_weights_of_plain_float32(name: str) -> None:
    def run(policy: Policy | None) -> list[Tensor]:
        model = small_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        scaler = None if policy is None else LossScaler(model, policy)
        for step in range(STEPS):
            for micro_batch in range(4):
                loss = loss_of(model, 4 * step + micro_batch) / 4
                loss.backward() if scaler is None else scaler.backward(loss)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    assert worst_ulps(run(Dynamic(growth_interval=1)), run(None)) == 0


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_inside_autocast_is_the_same_step(fused: bool) -> None:
    def run(inside: bool) -> list[Tensor]:
        model = wide_model()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = LossScaler(model, Static(1024.0))
        for step in range(3):
            with autocast(dtype=torch.bfloat16):
                loss = loss_of(model, step)
                if inside:
                    scaler.backward(loss)
                    scaler.step(optimizer, clip_norm=CLIP)
            if not inside:
                scaler.backward(loss)
                scaler.step(optimizer, clip_norm=CLIP)
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    assert worst_ulps(run(inside=True), run(inside=False)) == 0


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["adamw fused", "adamw foreach"])
def test_another_default_type_changes_nothing(name: str) -> None:
    def run(dtype: torch.dtype) -> list[Tensor]:
        model = small_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        scaler = LossScaler(model, Dynamic(growth_interval=2))
        for step in range(STEPS):
            loss = loss_of(model, step)
            with default_type(dtype):
                scaler.backward(loss)
                scaler.step(optimizer, clip_norm=CLIP, clip_value=1.0)
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    assert worst_ulps(run(torch.float64), run(torch.float32)) == 0
