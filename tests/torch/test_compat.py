"""What a version of torch lacks is refused, with the version that has it."""

import copy
import importlib
import pickle
import re

import pytest
import torch
from tests.torch.versions import needs_grad_dtype

import gradscale.torch
from gradscale.torch import GradScaler, LossScaler, MasterWeights, compat

NEEDS = r"`grad_fp32=True` needs `Tensor\.grad_dtype`, which torch has since 2\.10\. Found: torch "


@pytest.fixture
def _without_grad_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_grad_dtype", lambda: False)


@pytest.mark.parametrize("found", ["2.5.1+cu124", "1.13.0", "2.0.0a0+git1"])
def test_a_version_that_is_too_old_is_refused(found: str) -> None:
    rule = f"`gradscale.torch` needs torch 2.6 or newer. Found: torch {found}. Install a newer one: "
    with pytest.raises(ImportError, match=re.escape(rule) + r'pip install "torch>=2\.6"'):
        compat.check_version(found)


# The second is what NVIDIA's containers have, and the last one nothing that can be compared.
@pytest.mark.parametrize("found", ["2.6.0", "2.6.0a0+ecf3bae40a.nv25.01", "2.15.0+cpu", "3.0.0", "git1234567"])
def test_a_version_that_is_new_enough_is_not(found: str) -> None:
    compat.check_version(found)


def test_an_old_version_is_refused_when_gradscale_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.5.1")
        with pytest.raises(ImportError, match=r"needs torch 2\.6 or newer"):
            importlib.reload(compat)
    assert gradscale.torch.compat is compat


@pytest.mark.usefixtures("_without_grad_dtype")
def test_float32_gradients_are_refused_where_torch_ignores_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(NotImplementedError, match=NEEDS):
        MasterWeights(optimizer, grad_fp32=True)
    assert optimizer.param_groups[0]["params"][0] is parameter


@needs_grad_dtype
def test_a_copy_with_float32_gradients_is_refused_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0), grad_fp32=True)
    saved = pickle.dumps(optimizer)
    monkeypatch.setattr(compat, "has_grad_dtype", lambda: False)
    for copied in (lambda: pickle.loads(saved), lambda: copy.deepcopy(optimizer)):
        with pytest.raises(NotImplementedError, match=NEEDS):
            copied()


@pytest.mark.usefixtures("_without_grad_dtype")
@pytest.mark.parametrize("call", ["clip_value", "unscaled"])
def test_what_needs_float32_gradients_names_the_version(call: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0))
    scaler = LossScaler()
    scaler.backward(parameter.float().sum())
    with pytest.raises(TypeError, match=r"grad_fp32=True\)`, which needs torch 2\.10 or newer\."):
        scaler.step(optimizer, clip_value=1.0) if call == "clip_value" else scaler.unscaled(optimizer).__enter__()


@pytest.mark.usefixtures("_without_grad_dtype")
def test_without_grad_dtype_gradients_have_the_dtype_of_their_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad_dtype = torch.float32  # an attribute as any other, on an older version
    assert compat.grad_dtype(parameter) is torch.float16


def test_a_growth_factor_that_is_nan_is_refused_as_such() -> None:
    with pytest.raises(ValueError, match="`growth_factor` must be finite"):
        GradScaler("cpu", growth_factor=torch.nan)
