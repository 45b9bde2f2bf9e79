"""Names of parameters are those of the user's own model, whatever wraps it."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from tests.torch.helpers import INF, loss_of, poison, small_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gradscale import Dynamic
from gradscale.torch import GradScaler, LossScaler, explain
from gradscale.torch.wrappers import PARTS, own_module, own_name


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


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("wrap", [lambda module: module, compiled], ids=["plain", "compile"])
def test_a_child_of_the_users_with_the_name_of_a_wrappers_is_kept(
    name: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = nn.Sequential(OrderedDict({name: nn.Linear(4, 4), "head": compiled(nn.Linear(4, 1))}))
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(wrap(model), Dynamic())
    scaler.backward(torch.stack([parameter.sum() for parameter in model.parameters()]).sum())
    for parameter in model.parameters():
        poison(parameter, INF)
    found = [culprit.name for culprit in scaler.step(optimizer).culprits()]
    assert found == [f"{name}.weight", f"{name}.bias", "head.weight", "head.bias"]
    assert [row.name for row in explain(wrap(model)).modules] == [name, "head"]
