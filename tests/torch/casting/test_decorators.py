"""Decorated functions are cast wherever autocast is on."""

import pytest
import torch
from tests.torch.helpers import autocast
from torch import Tensor, nn

from gradscale.torch import casts, float_function, half_function, promote_function

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@half_function
def in_half(x: Tensor) -> Tensor:
    return x


@float_function
def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies."""
    return a @ b


@promote_function
def widest(parts: dict[str, Tensor]) -> list[torch.dtype]:
    return [part.dtype for part in parts.values()]


@pytest.mark.parametrize("half", [FP16, BF16])
def test_arguments_are_cast_under_autocast(half: torch.dtype) -> None:
    x = torch.ones(2, 2)
    with autocast(dtype=half):
        assert in_half(x).dtype == half
        assert product(x.to(half), x).dtype == FP32
        assert widest({"a": x, "b": x.to(half)}) == [FP32, FP32]
        assert widest({"a": x.to(half), "b": x.to(half)}) == [half, half]


def test_nothing_is_cast_where_autocast_is_off() -> None:
    x = torch.ones(2, 2)
    assert in_half(x).dtype == FP32
    assert product(x.half(), x.half()).dtype == FP16
    with autocast(dtype=FP16), autocast(enabled=False):
        assert widest({"a": x, "b": x.half()}) == [FP32, FP16]


def test_a_decorated_function_keeps_its_name_and_gradients_their_type() -> None:
    assert (product.__name__, product.__doc__) == ("product", "Multiplies.")
    x = torch.ones(2, 2, dtype=FP16, requires_grad=True)
    with autocast(dtype=FP16):
        product(x, x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == FP16


def test_methods_can_be_decorated() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        @float_function
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    with autocast(dtype=FP16):
        assert Head()(torch.ones(1, 2, dtype=FP16)).dtype == FP32


def test_a_decorated_function_may_be_listed_and_decides_itself_under_autocast() -> None:
    x = torch.ones(2, 2)
    with casts(half=[product]):
        assert product(x, x).dtype == FP16
        with autocast(dtype=FP16):
            assert product(x, x).dtype == FP32
