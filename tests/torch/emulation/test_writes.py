"""Functions that write to a tensor of the caller: `out`, and products in place."""

from collections.abc import Callable

import pytest
import torch
from tests.torch.emulation.operations import are_of
from torch import Tensor

from gradscale.formats import BF16, FP8_E4M3, FP16, Format
from gradscale.torch import emulate

FORMATS = pytest.mark.parametrize("known", [FP16, BF16, FP8_E4M3], ids=lambda known: known.name)

Shapes = tuple[tuple[int, ...], ...]

PRODUCTS: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "mm": (torch.mm, ((5, 9), (9, 7))),
    "matmul": (torch.matmul, ((5, 9), (9, 7))),
    "bmm": (torch.bmm, ((2, 5, 9), (2, 9, 7))),
    "addmm": (torch.addmm, ((5, 7), (5, 9), (9, 7))),
    "linalg.matmul": (torch.linalg.matmul, ((5, 9), (9, 7))),
}

IN_PLACE: dict[str, Shapes] = {
    "addmm": ((5, 7), (5, 9), (9, 7)),
    "addmv": ((5,), (5, 9), (9,)),
    "addr": ((5, 7), (5,), (7,)),
    "addbmm": ((5, 7), (2, 5, 9), (2, 9, 7)),
    "baddbmm": ((2, 5, 7), (2, 5, 9), (2, 9, 7)),
}


def operands_of(shapes: Shapes) -> list[Tensor]:
    """Returns thirds of small integers, which no format holds. Once rounded, their sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-8, 8, shape, generator=generator) / 3 for shape in shapes]


@FORMATS
@pytest.mark.parametrize("name", PRODUCTS)
def test_out_gets_the_rounded_product_of_rounded_operands(name: str, known: Format) -> None:
    function, shapes = PRODUCTS[name]
    operands = operands_of(shapes)
    with emulate(known):
        expected = function(*operands)
        out = torch.empty_like(expected)
        assert function(*operands, out=out) is out
    assert torch.equal(out, expected)
    assert are_of(out, known)


@FORMATS
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_product_in_place_is_the_product_out_of_place(name: str, known: Format) -> None:
    target, *operands = operands_of(IN_PLACE[name])
    with emulate(known):
        expected = getattr(torch, name)(target, *operands, beta=0.5, alpha=2.0)
        assert getattr(target, f"{name}_")(*operands, beta=0.5, alpha=2.0) is target
    assert torch.equal(target, expected)
    assert are_of(target, known)


@FORMATS
def test_gradients_of_a_product_in_place_are_those_of_one_out_of_place(known: Format) -> None:
    grads = []
    for in_place in (True, False):
        target, a, b = (operand.requires_grad_() for operand in operands_of(IN_PLACE["addmm"]))
        with emulate(known):
            start = target * 1
            made = start.addmm_(a, b) if in_place else start.addmm(a, b)
        made.square().sum().backward()
        grads.append([operand.grad for operand in (target, a, b)])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_function_of_narrow_tensors_gives_out_numbers_of_the_format() -> None:
    x, w = operands_of(((5, 9), (9, 7)))
    with emulate("fp16"):
        narrow = x @ w
        out = torch.div(narrow, 3.0, out=torch.empty(5, 7))
        wide = torch.div(narrow, torch.full((7,), 3.0), out=torch.empty(5, 7))
    assert are_of(out, FP16)
    assert torch.equal(wide, narrow / 3.0)
    assert not are_of(wide, FP16)


def test_float64_is_left_alone() -> None:
    target, a, b = (operand.double() for operand in operands_of(IN_PLACE["addmm"]))
    expected = torch.addmm(target, a, b)
    with emulate("e4m3"):
        assert torch.equal(torch.addmm(target, a, b, out=torch.empty_like(target)), expected)
        assert torch.equal(target.addmm_(a, b), expected)
