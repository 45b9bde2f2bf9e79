"""Targets of a benchmark: models, optimizers and devices made from names, and errors."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.step import IMPLEMENTATIONS, OPTIMIZERS, made_up_shapes, optimizer_of, shapes_of

from gradscale.checkup.targets import BadTarget, device_of, load_function

OWN = """
import torch
from torch import nn

WIDTH = 3

def model():
    tied = nn.Linear(WIDTH, WIDTH)
    frozen = nn.Linear(WIDTH, 7).requires_grad_(False)
    return nn.Sequential(nn.Linear(WIDTH, 2), tied, tied, frozen)

def parameters():
    twice = nn.Parameter(torch.zeros(4, 5))
    yield twice
    yield twice
    yield nn.Parameter(torch.zeros(()))

def groups():
    return [{"params": list(model().parameters())}]

def frozen():
    return nn.Linear(2, 2).requires_grad_(False)

def number():
    return 7

def empty():
    return [nn.Parameter(torch.zeros(0, 3))]

def matrix():
    return nn.Parameter(torch.zeros(3, 4))

def broken():
    raise ValueError("a bug of the user's")

def rmsprop(params):
    return torch.optim.RMSprop(params)

class Models:
    tiny = staticmethod(lambda: nn.Linear(1, 1, bias=False))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's, in the current folder."""
    (tmp_path / "users_own.py").write_text(OWN)
    (tmp_path / "users_broken.py").write_text("import nothing_of_the_kind")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "users_own"
    sys.modules.pop("users_own", None)


def test_a_model_gives_the_shapes_that_it_trains_each_once(own: str) -> None:
    assert shapes_of(f"{own}:model") == [(2, 3), (2,), (3, 3), (3,)]


def test_parameters_may_be_given_instead_of_a_module_and_count_once(own: str) -> None:
    assert shapes_of(f"{own}:parameters") == [(4, 5), ()]


def test_a_single_parameter_is_one_and_not_its_rows(own: str) -> None:
    assert shapes_of(f"{own}:matrix") == [(3, 4)]


def test_a_function_may_be_inside_a_class(own: str) -> None:
    assert shapes_of(f"{own}:Models.tiny") == [(1, 1)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "nothing_of_the_kind:f",
            "`--model` must name a module that Python finds.* Received: nothing_of_the_kind. Run",
        ),
        ("users_own.deeper:f", r"must name a module that Python finds.* Received: users_own\.deeper"),
        ("users_own:nope", "must name a function of users_own. Received: users_own:nope, which is nothing"),
        ("users_own:nope.deeper", "which is nothing"),
        ("users_own:WIDTH", "which is int"),
        ("users_own", "`--model` must be MODULE:FUNCTION, as in my_package.models:make. Received: 'users_own'."),
        (":model", "must be MODULE:FUNCTION"),
        ("users_own:", "must be MODULE:FUNCTION"),
        ("", "must be MODULE:FUNCTION"),
        ("users_own:number", "must return a torch.nn.Module or an iterable of parameters. Received: int from users_ow"),
        (
            "users_own:groups",
            "must return a torch.nn.Module or an iterable of parameters. Received: dict from users_ow",
        ),
        ("users_own:frozen", "must have parameters that require gradients. Received: none from users_own:frozen"),
        ("users_own:empty", "must have parameters that require gradients. Received: none from users_own:empty"),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_model_that_cannot_be_measured_is_refused(path: str, text: str) -> None:
    with pytest.raises(BadTarget, match=text):
        shapes_of(path)


def test_a_bug_in_the_users_own_code_shows_as_it_is(own: str) -> None:
    with pytest.raises(ValueError, match="a bug of the user's") as caught:
        shapes_of(f"{own}:broken")
    assert not isinstance(caught.value, BadTarget)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_the_kind"):
        load_function("--model", "users_broken:model")


@pytest.mark.parametrize(("parameters", "tensors"), [(10, 3), (7, 7), (1_000_000, 64), (5, 1)])
def test_a_made_up_model_has_the_size_asked_for_in_nearly_equal_tensors(parameters: int, tensors: int) -> None:
    sizes = list(itertools.chain.from_iterable(made_up_shapes(parameters, tensors)))
    assert (sum(sizes), len(sizes)) == (parameters, tensors)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("parameters", "tensors"), [(3, 4), (0, 1), (3, 0)])
def test_a_made_up_model_has_no_empty_tensors(parameters: int, tensors: int) -> None:
    with pytest.raises(BadTarget, match=f"so that none is empty. Received: {tensors} tensors for {parameters} param"):
        made_up_shapes(parameters, tensors)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_made_with_the_kernels_asked_for(name: str, implementation: str) -> None:
    called, make = optimizer_of(name, implementation)
    optimizer = make([torch.nn.Parameter(torch.zeros(2))])
    assert called == f"{name} {implementation}"
    assert type(optimizer).__name__.lower() == name
    assert bool(optimizer.defaults["fused"]) is (implementation == "fused")
    assert bool(optimizer.defaults["foreach"]) is (implementation == "foreach")


def test_an_optimizer_is_fused_unless_said_otherwise() -> None:
    called, make = optimizer_of("adamw", None)
    assert called == "adamw fused"
    assert make([torch.nn.Parameter(torch.zeros(2))]).defaults["fused"] is True


def test_an_optimizer_may_be_the_users_own(own: str) -> None:
    called, make = optimizer_of(f"{own}:rmsprop", None)
    assert called == "users_own:rmsprop"
    assert isinstance(make([torch.nn.Parameter(torch.zeros(2))]), torch.optim.RMSprop)


@pytest.mark.parametrize(
    ("name", "implementation", "text"),
    [
        ("adamx", None, "`--optimizer` must be adamw, adam, sgd, adagrad or MODULE:FUNCTION.* Received: 'adamx'"),
        ("adamw", "slow", "`--implementation` must be one of fused, foreach, for-loop. Received: 'slow'"),
        ("a:b", "fused", "`--implementation` is for adamw, .* Received: fused with --optimizer a:b. Leave it out"),
        ("nothing_of_the_kind:f", None, "`--optimizer` must name a module that Python finds"),
    ],
)
def test_an_optimizer_that_is_misspelt_is_refused(name: str, implementation: str | None, text: str) -> None:
    with pytest.raises(BadTarget, match=text):
        optimizer_of(name, implementation)


@pytest.mark.usefixtures("own")
def test_a_function_that_makes_no_optimizer_is_refused() -> None:
    make = optimizer_of("builtins:len", None)[1]
    with pytest.raises(BadTarget, match=r"must return a torch.optim.Optimizer. Received: int from builtins:len"):
        make([torch.zeros(1)])


def test_kernels_that_a_device_does_not_have_are_refused() -> None:
    text = "must be one that torch has for the optimizer on meta. Received: adamw fused: `fused=True` requires"
    with pytest.raises(BadTarget, match=text):
        optimizer_of("adamw", "fused", "meta")


def with_accelerator(monkeypatch: pytest.MonkeyPatch, name: str | None, count: int = 0) -> None:
    device = None if name is None else torch.device(name)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_the_device_is_the_accelerator_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with_accelerator(monkeypatch, None)
    assert device_of(None) == device_of("cpu") == "cpu"
    with_accelerator(monkeypatch, "cuda", count=2)
    assert device_of(None) == "cuda"
    assert [device_of(name) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda:1"]


@pytest.mark.parametrize("name", ["cuda:2", "cuda:x", "cuda:-1", "mps", "meta", "cpu:1", "", "gpu"])
def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with_accelerator(monkeypatch, "cuda", count=2)
    with pytest.raises(BadTarget, match=f"`--device` must be one .* here: cpu, cuda. Received: '{name}'."):
        device_of(name)
