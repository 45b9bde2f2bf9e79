"""A `prepare` that fails half-way, and leaves models and optimizers as they were."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.torch.helpers import small_model
from tests.torch.precision.models import Net, loss_of
from tests.torch.precision.refusals import refused

from gradscale.torch import O2, prepare
from gradscale.torch.masters import optimizer as masters
from gradscale.torch.masters.master import made_anew

SGD = torch.optim.SGD


class Failing(SGD):
    """An optimizer whose state cannot be loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise RuntimeError("no state")


@pytest.mark.parametrize("level", ["O3", "O3-bf16"])
def test_an_optimizer_that_fails_half_way_leaves_all_as_it_was(level: str) -> None:
    model = Net()
    loss_of(model).backward()
    healthy = torch.optim.AdamW(model.conv.parameters(), eps=1e-4)
    healthy.step()
    grads = [parameter.grad for parameter in model.parameters()]
    optimizers = [healthy, Failing(model.head.parameters())]
    state, groups = healthy.state[model.conv.weight]["exp_avg"], list(healthy.param_groups)
    refused(RuntimeError, "no state", model, optimizers, level)
    assert healthy.state[model.conv.weight]["exp_avg"] is state
    assert all(one is other for one, other in zip(healthy.param_groups, groups, strict=True))
    assert [parameter.grad for parameter in model.parameters()] == grads
    assert {grad.dtype for grad in grads if grad is not None} == {torch.float32}
    prepare(model, [healthy, SGD(model.head.parameters())], level)


@pytest.mark.parametrize("storage", ["fp32", "remainder", "kahan", "stochastic"])
def test_masters_that_cannot_be_made_leave_all_as_it_was(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    loss_of(model).backward()
    optimizers = [torch.optim.AdamW(model.conv.parameters()), torch.optim.AdamW(model.head.parameters())]
    optimizers[0].step()
    state = copy.deepcopy(optimizers[0].state_dict())
    calls = iter([None, None, MemoryError("no memory")])

    def failing(*args: Any) -> Any:
        if (error := next(calls)) is not None:
            raise error
        return made_anew(*args)

    monkeypatch.setattr(masters, "made_anew", failing)
    refused(MemoryError, "no memory", model, optimizers, replace(O2, master_weights=storage))
    assert optimizers[0].param_groups[0]["params"] == list(model.conv.parameters())
    assert str(optimizers[0].state_dict()) == str(state)
    monkeypatch.undo()
    prepare(model, optimizers, "O2")


class Closed(SGD):
    """An optimizer that takes no groups after it was built."""

    built = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.built:
            raise RuntimeError("no more groups")
        super().add_param_group(param_group)


def test_an_optimizer_that_takes_no_more_groups_is_not_asked_to() -> None:
    model = small_model()
    optimizer = Closed(model.parameters())
    optimizer.built = True
    prepare(model, optimizer, "O2")
