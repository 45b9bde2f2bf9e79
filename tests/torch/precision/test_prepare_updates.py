"""Optimizers that `prepare` refuses, because they are known to fail on half weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.torch.helpers import small_model
from tests.torch.precision.refusals import refused
from torch import nn

from gradscale.torch import O2, O3, fused_sgd, prepare

SGD = torch.optim.SGD

WITH_EPS = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
]


@pytest.mark.parametrize("optimizer_class", WITH_EPS)
def test_an_eps_that_is_zero_in_fp16(optimizer_class: Any) -> None:
    model = small_model()
    name = optimizer_class.__name__
    message = rf"`eps` below 6.0e-08.* Received: {name} with eps=1e-(08|10)\. Use master weights, .* or build it with"
    refused(ValueError, message, model, optimizer_class(model.parameters()), "O3")


def test_an_eps_that_is_zero_in_fp16_in_the_second_group_or_of_the_second_optimizer() -> None:
    model = small_model()
    groups = [{"params": model[0].parameters(), "eps": 1e-4}, {"params": model[2].parameters()}]
    refused(ValueError, "eps=1e-08", model, torch.optim.Adam(groups), "O3")
    optimizers = [SGD(model[0].parameters()), torch.optim.Adam(model[2].parameters())]
    for level in ("O3", replace(O2, master_weights=None)):
        refused(ValueError, "eps=1e-08", model, optimizers, level)


@pytest.mark.parametrize(
    ("level", "kwargs"),
    [("O3", {"eps": 1e-4}), ("O3-bf16", {}), ("O2", {}), ("O1", {}), (replace(O3, keep_fp32=(nn.Linear,)), {})],
)
def test_an_eps_is_not_refused_where_it_is_held(level: Any, kwargs: Any) -> None:
    model = small_model()
    prepare(model, torch.optim.Adam(model.parameters(), **kwargs), level)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.SGD])
def test_optimizers_whose_eps_fp16_holds_and_those_without(optimizer_class: Any) -> None:
    model = small_model()
    prepare(model, optimizer_class(model.parameters()), "O3")


class FloatAdam(torch.optim.Optimizer):
    """A third-party optimizer, which may compute in float32."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"eps": 1e-8})


def test_an_eps_of_an_optimizer_that_is_not_torchs_is_its_own_affair() -> None:
    model = small_model()
    prepare(model, FloatAdam(model.parameters()), "O3")


@pytest.mark.filterwarnings("ignore:These parameters are FP16")
@pytest.mark.cpu_only("a fault of the CPU's fused kernel")
@pytest.mark.parametrize("level", ["O3", "O3-bf16"])
def test_a_fused_sgd_that_does_not_update_16_bit_parameters(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_sgd, "_is_broken", lambda: True)
    model = small_model()
    model, optimizer, scaler = prepare(model, SGD(model.parameters(), fused=True), level)
    scaler.backward(model(torch.randn(3, 4)).square().mean())
    with pytest.raises(RuntimeError, match=r"Received: SGD with fused=True.* Build it with `fused=False`"):
        scaler.step(optimizer)
