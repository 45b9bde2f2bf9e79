"""torch's fused SGD, which leaves most elements of 16-bit parameters on the CPU as they are in torch 2.13."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from gradscale import NoScaling, Static
from gradscale.torch import GradScaler, LossScaler, MasterWeights, fused_sgd

pytestmark = pytest.mark.cpu_only("a fault of the CPU's fused kernel")

HALF_DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of torch 2.13, whichever torch there is."""
    monkeypatch.setattr(fused_sgd, "_is_broken", lambda: True)


def parameter_with_gradient(scaler: LossScaler, dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((64,), 8.0, dtype=dtype))
    scaler.backward((parameter.float() * 2.0).sum())
    return parameter


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_updates_every_element_or_is_refused(dtype: torch.dtype, momentum: float) -> None:
    """With the kernel that is installed."""
    scaler = LossScaler(policy=NoScaling())
    parameter = parameter_with_gradient(scaler, dtype)
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=momentum, fused=True)
    if fused_sgd._is_broken():
        with pytest.raises(RuntimeError, match="fused SGD leaves most elements"):
            scaler.step(optimizer)
        assert parameter.unique().tolist() == [8.0]
    else:
        scaler.step(optimizer)
        assert parameter.unique().tolist() == [7.0]


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("policy", [NoScaling(), Static(4.0)])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_the_refusal_says_what_to_do_and_changes_nothing(dtype: torch.dtype, policy: Any) -> None:
    scaler = LossScaler(policy=policy)
    parameter = parameter_with_gradient(scaler, dtype)
    assert parameter.grad is not None
    before = parameter.grad.clone()
    wide = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([wide, parameter], lr=0.5, fused=True)
    with pytest.raises(RuntimeError, match=r"Received: SGD with fused=True, in torch .*`fused=False`, .*`gradscale\."):
        scaler.step(optimizer)
    assert torch.equal(parameter.grad, before)
    with pytest.warns(UserWarning, match="are FP16") if dtype is torch.float16 and policy.needs else nullcontext():
        scaler.step(torch.optim.SGD([wide, parameter], lr=0.5, fused=False))
    assert parameter.unique().tolist() == [7.0]


@pytest.mark.usefixtures("broken")
def test_float32_parameters_and_masters_are_stepped_with_the_fused_kernel() -> None:
    scaler = LossScaler(policy=Static(4.0))
    wide = parameter_with_gradient(scaler, torch.float32)
    half = parameter_with_gradient(scaler, torch.float16)
    scaler.step(torch.optim.SGD([wide], lr=0.5, fused=True), MasterWeights(torch.optim.SGD([half], lr=0.5, fused=True)))
    assert wide.unique().tolist() == half.unique().tolist() == [7.0]


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.cpu_only("the kernel of the CPU is the one that is wrong")
def test_the_drop_in_steps_as_torch_does_and_warns_once(dtype: torch.dtype, unscales: bool) -> None:
    parameter = nn.Parameter(torch.full((64,), 8.0, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((parameter.float() * 2.0).sum()).backward()
            if unscales and dtype is torch.bfloat16:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert ["fused SGD leaves most elements of FP16" in str(each.message) for each in caught] == [True]
    assert scaler.metrics()["applied"] == 3


@pytest.mark.usefixtures("broken")
def test_the_drop_in_does_not_warn_of_float32_parameters() -> None:
    parameter = nn.Parameter(torch.full((64,), 8.0))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale((parameter * 2.0).sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=0.5, fused=True))
    assert parameter.unique().tolist() == [7.0]


def test_the_trial_agrees_with_the_optimizer() -> None:
    parameter = nn.Parameter(torch.zeros(32, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert fused_sgd._is_broken() is (parameter.unique().tolist() != [-2.5])
