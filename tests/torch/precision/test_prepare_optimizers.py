"""What `prepare` makes of optimizers: masters, and the state that is there already."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.torch.precision.models import Net, loss_of, prepared
from torch import nn

from gradscale.torch import O1, O2, O3, MasterWeights, prepare

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O1-bf16", "O3-bf16"])
def test_the_optimizer_comes_back_as_it_is_without_masters(level: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    assert prepare(model, optimizer, level)[1] is optimizer


@pytest.mark.parametrize("storage", ["fp32", "remainder", "kahan", "stochastic"])
def test_masters_are_in_the_storage_asked_for(storage: Any) -> None:
    model = Net()
    inner = torch.optim.AdamW(model.parameters())
    _, optimizer, _ = prepare(model, inner, replace(O2, master_weights=storage))
    assert isinstance(optimizer, MasterWeights)
    assert optimizer.storage == storage
    assert optimizer.optimizer is inner


@pytest.mark.parametrize("storage", ["fp32", "remainder"])
@pytest.mark.parametrize("compute", [HALF, BF16])
def test_masters_are_the_float32_weights_from_before_the_cast(compute: torch.dtype, storage: Any) -> None:
    model = Net()
    with torch.no_grad():
        model.head.weight.clamp_(min=2**-10)  # where FP16 and its remainder are exact
    exact = model.head.weight.detach().clone()
    _, optimizer, _ = prepare(
        model, torch.optim.SGD(model.parameters()), replace(O2, compute=compute, master_weights=storage)
    )
    assert isinstance(optimizer, MasterWeights)
    found = next(value for weight, value in optimizer.masters() if weight is model.head.weight)
    assert torch.equal(found, exact)
    assert torch.equal(model.head.weight, exact.to(compute))


def test_parameter_groups_keep_their_settings() -> None:
    model = Net()
    groups = [{"params": [model.conv.weight], "lr": 0.5}, {"params": list(model.head.parameters()), "lr": 0.1}]
    for level in (O1, O2, O3):
        fresh = copy.deepcopy((model, groups))
        _, optimizer, _ = prepare(fresh[0], torch.optim.SGD(fresh[1], momentum=0.9), level)
        assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(0.5, 1), (0.1, 2)]
        assert optimizer.param_groups[0]["params"][0] is fresh[0].conv.weight


def optimizer_with_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_state_that_is_there_already_stays_float32_beside_masters() -> None:
    model = Net()
    optimizer = optimizer_with_state(model)
    before = {name: optimizer.state[value]["exp_avg"].clone() for name, value in model.named_parameters()}
    _, optimizer, _ = prepare(model, optimizer, "O2")
    for name, value in model.named_parameters():
        assert torch.equal(optimizer.state[value]["exp_avg"], before[name])
        assert optimizer.state[value]["exp_avg"].dtype is FLOAT


def test_state_that_is_there_already_becomes_half_without_masters() -> None:
    model = Net()
    _, optimizer, _ = prepare(model, optimizer_with_state(model), "O3-bf16")
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {BF16}
    loss_of(model).backward()
    optimizer.step()


def test_gradients_that_are_there_become_half_with_their_weights() -> None:
    model = Net()
    loss_of(model).backward()
    prepared(O2, model)
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.dtype is HALF


class Closed(torch.optim.SGD):
    """An optimizer that takes no groups after it was built."""

    built = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.built:
            raise RuntimeError("no more groups")
        super().add_param_group(param_group)


def test_an_optimizer_that_takes_no_more_groups_is_not_asked_to() -> None:
    model = Net()
    optimizer = Closed(model.parameters())
    optimizer.built = True
    prepare(model, optimizer, "O2")
