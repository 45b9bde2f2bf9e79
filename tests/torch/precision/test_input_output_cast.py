"""The input/output cast of a module: what is cast, and what is left alone."""

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from tests.torch.helpers import autocast
from tests.torch.test_cast import NO_CASTS, one
from tests.torch.versions import recompile_limit
from torch import Tensor, nn

from gradscale.torch.precision.casts import (
    InputOutputCast,
    input_output_cast_of,
    set_input_output_cast,
)

HALF = torch.float16


@pytest.mark.parametrize("value", NO_CASTS, ids=lambda value: type(value).__name__)
def test_a_cast_of_nothing_returns_the_same_object(value: Any) -> None:
    module = nn.Identity()
    set_input_output_cast(module, InputOutputCast(None, None, None))
    assert module(value) is value


def test_a_model_can_write_to_a_container_it_is_given() -> None:
    class Remembers(nn.Module):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x)
            return x

    module, cache = Remembers(), [torch.ones(1, dtype=HALF)]
    set_input_output_cast(module, InputOutputCast(HALF, None, torch.float32))
    module(one(), cache)
    assert [tensor.dtype for tensor in cache] == [HALF, HALF]


class Scaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, factor: Tensor | None = None) -> dict[str, Tensor]:
        """Scales."""
        self.seen.append(x.dtype)
        return {"y": self.linear(x) * (1 if factor is None else factor)}


def with_cast(how: InputOutputCast) -> Scaler:
    module = Scaler()
    if how.inputs is not None:
        module.linear.to(how.inputs)
    set_input_output_cast(module, how)
    return module


def test_inputs_and_outputs_are_cast_by_position_and_by_name() -> None:
    module = with_cast(InputOutputCast(torch.bfloat16, None, torch.float32))
    assert module(one()[None], factor=one())["y"].dtype is torch.float32
    assert module(x=one()[None])["y"].dtype is torch.float32
    assert module.seen == [torch.bfloat16] * 2


def test_autocast_is_on_inside_and_not_outside() -> None:
    module = with_cast(InputOutputCast(None, torch.bfloat16, None))
    assert module(one()[None])["y"].dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_can_be_switched_off_inside() -> None:
    module = with_cast(InputOutputCast(None, torch.float32, None))
    with autocast(dtype=torch.bfloat16):
        assert module(one()[None])["y"].dtype is torch.float32


def test_an_error_inside_leaves_autocast_as_it_was() -> None:
    module = with_cast(InputOutputCast(None, torch.bfloat16, None))
    with pytest.raises(AttributeError, match="dtype"):
        module("text")
    assert not torch.is_autocast_enabled("cpu")


def test_the_module_stays_what_it_was() -> None:
    module, plain = with_cast(InputOutputCast(None, torch.bfloat16, None)), Scaler()
    assert isinstance(module, Scaler)
    assert type(module).__name__ == "Scaler"
    assert type(module).__mro__[2] is Scaler
    assert repr(module) == repr(plain)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert module.forward.__doc__ == "Scales."


def through_torch(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), through_torch]


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle", "torch"])
def test_copies_and_pickles_keep_the_cast(copied: Any) -> None:
    how = InputOutputCast(torch.bfloat16, None, torch.float32)
    module = with_cast(how)
    made = copied(module)
    assert type(made) is type(module)
    assert input_output_cast_of(made) == how
    assert torch.equal(made(one()[None])["y"], module(one()[None])["y"])


def test_a_deep_copy_runs_on_its_own_weights() -> None:
    module = with_cast(InputOutputCast(None, torch.bfloat16, None))
    made = copy.deepcopy(module)
    with torch.no_grad():
        made.linear.weight.zero_()
        made.linear.bias.zero_()
    assert not made(one()[None])["y"].any()
    assert module(one()[None])["y"].any()


class Rebuilt(nn.Linear):
    """Says itself how to pickle it."""

    def __reduce__(self) -> Any:
        return Rebuilt, (self.in_features, self.out_features)


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle", "torch"])
def test_modules_that_say_how_to_copy_them_keep_the_cast(copied: Any) -> None:
    module = Rebuilt(2, 3)
    set_input_output_cast(module, InputOutputCast(None, None, torch.bfloat16))
    made = copied(module)
    assert type(made) is type(module)
    assert made(one()).dtype is torch.bfloat16


def test_a_module_built_by_the_class_of_another_has_no_cast() -> None:
    module = with_cast(InputOutputCast(None, torch.bfloat16, None))
    new = type(module)()
    assert input_output_cast_of(new) is None
    assert new(one()[None])["y"].dtype is torch.float32
    set_input_output_cast(new, InputOutputCast(None, None, HALF))
    assert type(new) is type(module)
    assert new(one()[None])["y"].dtype is HALF


@pytest.mark.parametrize(
    "how", [InputOutputCast(HALF, None, torch.float32), InputOutputCast(None, HALF, torch.float32)]
)
def test_a_module_with_a_cast_compiles_to_one_graph(how: InputOutputCast) -> None:
    torch._dynamo.reset()
    module = with_cast(how)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(compiled(one()[None])["y"], module(one()[None])["y"])


def test_modules_of_many_classes_compile_without_using_up_each_others_limit() -> None:
    torch._dynamo.reset()
    for index in range(recompile_limit() + 2):
        kind = type(f"Scaler{index}", (Scaler,), {})
        module = kind()
        set_input_output_cast(module, InputOutputCast(None, HALF, torch.float32))
        torch.compile(module, fullgraph=True, backend="eager")(one()[None])
    torch._dynamo.reset()


def test_functional_calls_go_through_the_cast() -> None:
    module = with_cast(InputOutputCast(None, torch.bfloat16, torch.float32))
    zeros = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
    made = torch.func.functional_call(module, zeros, (one()[None],))["y"]
    assert made.dtype is torch.float32
    assert not made.any()


def test_a_module_without_parameters_can_have_a_cast() -> None:
    module = nn.Tanh()
    set_input_output_cast(module, InputOutputCast(torch.bfloat16, torch.bfloat16, torch.float32))
    assert module(one()).dtype is torch.float32
