"""Fake-quantization observers are put back when a step is skipped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import all_finite, poison, same, weights
from tests.torch.versions import needs_nan_ranges
from torch import Tensor, nn
from torch.ao import quantization as ao
from torch.nn.utils.parametrize import register_parametrization

from gradscale import Dynamic
from gradscale.torch import LossScaler, casts

pytestmark = pytest.mark.cpu_only("quantization for the CPU")

INT8 = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8}

KINDS = {"fused": ao.FusedMovingAvgObsFakeQuantize, "plain": ao.FakeQuantize}


with_nan_ranges = pytest.mark.parametrize("kind", ["fused", pytest.param("plain", marks=needs_nan_ranges)])


def quantized(layer: nn.Module, kind: Callable[..., Any]) -> nn.Module:
    by_channel = kind(ao.MovingAveragePerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, ch_axis=0, **INT8)
    register_parametrization(layer, "weight", by_channel)
    return nn.Sequential(kind(ao.MovingAverageMinMaxObserver, qscheme=torch.per_tensor_symmetric, **INT8), layer)


class Run:
    """A model of a plain layer and two quantized ones, trained under FP16 autocast."""

    def __init__(self, kind: str, *, protected: bool) -> None:
        plain, *others = (nn.Linear(4, 4) for _ in range(3))
        nn.init.ones_(plain.weight)
        first, second = (quantized(layer, KINDS[kind]) for layer in others)
        self.model = nn.Sequential(plain, first, nn.ReLU(), second)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, fused=True)
        self.scaler = LossScaler(self.model, Dynamic(init_scale=8.0))
        if protected:
            self.scaler.protect_buffers()

    def step(self, x: Tensor, *, bad_gradient: bool = False) -> bool:
        """Takes a step, and returns whether it was skipped."""
        with torch.autocast("cpu", dtype=torch.float16), casts(float=[torch.fused_moving_avg_obs_fake_quant]):
            loss = self.model(x).float().square().mean()
        self.scaler.backward(loss)
        if bad_gradient:
            poison(next(self.model.parameters()))
        skipped = self.scaler.step(self.optimizer).skipped()
        self.optimizer.zero_grad()
        return skipped

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


OVERFLOWING = torch.full((8, 4), 6e4)  # FP16 holds that, and not what the plain layer makes of it


def test_the_observers_hold_what_the_guard_is_to_protect(kind: str) -> None:
    run = Run(kind, protected=True)
    ends = {name.rpartition(".")[2] for name in run.buffers()}
    assert ends == {"fake_quant_enabled", "observer_enabled", "scale", "zero_point", "eps", "min_val", "max_val"}


@with_nan_ranges
def test_an_overflow_in_mid_training_leaves_no_trace_in_protected_observers(kind: str) -> None:
    run = Run(kind, protected=True)
    assert not any(run.step(torch.randn(8, 4)) for _ in range(3))
    before, kept = run.buffers(), weights(run.model)
    assert run.step(OVERFLOWING)
    assert same(run.buffers().values(), before.values())
    assert same(weights(run.model), kept)
    assert not any(run.step(torch.randn(8, 4)) for _ in range(3))
    assert all_finite(run.buffers().values())


def test_a_gradient_that_overflows_alone_does_not_move_protected_observers_either(kind: str) -> None:
    run = Run(kind, protected=True)
    run.step(torch.randn(8, 4))
    before = run.buffers()
    assert run.step(10 * torch.randn(8, 4), bad_gradient=True)
    assert same(run.buffers().values(), before.values())


@with_nan_ranges
def test_an_overflow_in_the_first_step_leaves_observers_as_new(kind: str) -> None:
    run = Run(kind, protected=True)
    before = run.buffers()
    assert run.step(OVERFLOWING)
    assert same(run.buffers().values(), before.values())


def test_an_applied_step_moves_protected_observers(kind: str) -> None:
    run = Run(kind, protected=True)
    before = run.buffers()
    assert not run.step(torch.randn(8, 4))
    assert not same(run.buffers().values(), before.values())


@with_nan_ranges
def test_without_protection_an_overflow_ruins_the_ranges_for_good(kind: str) -> None:
    run = Run(kind, protected=False)
    run.step(torch.randn(8, 4))
    assert run.step(OVERFLOWING)
    assert not all_finite(run.buffers().values())
    assert all(run.step(torch.randn(8, 4)) for _ in range(3))
    assert not all_finite(run.buffers().values())
