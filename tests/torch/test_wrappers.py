"""Names of parameters are those of the user's own model, whatever wraps it."""

from collections.abc import Callable

import pytest
import torch
from tests.torch.helpers import INF, loss_of, poison, small_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gradscale import Dynamic
from gradscale.torch import GradScaler, LossScaler, explain
from gradscale.torch.wrappers import own_module, own_name


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # pyright: ignore[reportReturnType]


def parts_compiled(module: nn.Module) -> nn.Module:
    assert isinstance(module, nn.Sequential)
    module[0] = compiled(checkpoint_wrapper(module[0]))
    return module


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "parts": parts_compiled,
    "DataParallel": nn.DataParallel,
    "compile around DataParallel": lambda module: compiled(nn.DataParallel(module)),
    "DataParallel around compile": lambda module: nn.DataParallel(compiled(module)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_culprits_and_errors_have_the_names_of_the_plain_model(name: str) -> None:
    model = small_model()
    wrapped = WRAPPED[name](model)
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(wrapped, Dynamic())
    scaler.backward(loss_of(model))
    poison(next(model.parameters()), INF)
    assert [culprit.name for culprit in scaler.step(optimizer).culprits()] == ["0.weight"]
    scaler.backward(loss_of(model))  # the gradients of the skipped step were not cleared
    with pytest.raises(RuntimeError, match=r"Parameters: 0\.weight, 0\.bias"):
        scaler.step(optimizer)


def test_names_that_the_optimizer_was_given_are_cleaned_too() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(compiled(model).named_parameters())
    scaler = GradScaler(next(model.parameters()).device.type)
    scaler.scale(loss_of(model)).backward()
    poison(next(model.parameters()), INF)
    scaler.step(optimizer)
    assert scaler.last is not None
    assert [culprit.name for culprit in scaler.last.culprits()] == ["0.weight"]


@pytest.mark.parametrize("name", WRAPPED)
def test_explain_has_the_names_of_the_plain_model(name: str) -> None:
    plain = [row.name for row in explain(small_model()).modules]
    assert [row.name for row in explain(WRAPPED[name](small_model())).modules] == plain


def test_a_name_of_the_users_is_kept() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert own_module(model) is model
    assert own_name("module.weight") == "module.weight"
    assert own_module(compiled(empty := nn.Sequential())) is empty
