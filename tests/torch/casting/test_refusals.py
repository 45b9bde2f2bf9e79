"""Errors of `casts`, raised when it is built."""

import math
from typing import Any

import pytest
import torch
from tests.torch.casting import library
from torch import Tensor, nn

from gradscale.torch import casts


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def local() -> Any:
    def inside(x: Tensor) -> Tensor:
        return x

    return inside


@pytest.mark.parametrize(
    "function",
    [
        *(math.sqrt, local(), lambda x: x, Twice.apply, torch.from_numpy, torch.ops.aten.relu),
        *(library.Layer().forward, library.Layer.make, library.Layer.types_of),
    ],
)
def test_a_function_whose_calls_cannot_be_caught_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"`half` takes functions whose calls can be caught.*decorated with `half_func"):
        casts(half=[function])


@pytest.mark.parametrize("thing", [nn.LayerNorm, nn.LayerNorm(4)])
def test_a_module_is_refused_with_the_method_to_name(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"LayerNorm.*Name a method of the class, such as `LayerNorm.forward`"):
        casts(float=[thing])


@pytest.mark.parametrize("function", [torch.relu_, Tensor.add_, Tensor.__iadd__, Tensor.__setitem__])
def test_a_function_that_writes_to_its_argument_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="must not list functions that write to their argument"):
        casts(half=[function])


def test_a_function_listed_twice_is_refused_under_whatever_name() -> None:
    with pytest.raises(ValueError, match=r"must be listed once.*softmax` in `float`, and before"):
        casts(half=[torch.softmax], float=[nn.functional.softmax])


def test_a_dtype_that_is_no_half_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`dtype` must be torch.float16 or torch.bfloat16. Received: dtype=torch.int8"
    ):
        casts(dtype=torch.int8)


def test_a_refusal_changes_nothing() -> None:
    before = library.types_of
    with pytest.raises(TypeError):
        casts(half=[library.types_of, math.sqrt])
    assert library.types_of is before
