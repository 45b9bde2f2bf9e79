"""`casts` runs functions in the precision they are listed under."""

import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
from tests.torch.casting import library
from tests.torch.casting.library import types_of
from tests.torch.helpers import autocast
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradscale.torch import casts

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def x(dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(4, 4).to(dtype)


def test_torch_functions_run_in_the_type_they_are_listed_under() -> None:
    with casts(half=[torch.matmul], float=[torch.cumsum], promote=[torch.cat]):
        assert torch.matmul(x(), x()).dtype == FP16
        assert torch.cumsum(x(FP16), 0).dtype == FP32
        assert torch.cat([x(FP16), x(BF16)]).dtype == FP32
        assert torch.cat([x(FP16), x(FP16)]).dtype == FP16
        assert torch.relu(x()).dtype == FP32
    assert torch.matmul(x(), x()).dtype == FP32


@pytest.mark.parametrize("listed", [torch.softmax, functional.softmax, Tensor.softmax, torch.special.softmax])
def test_a_torch_function_counts_under_all_its_names(listed: Any) -> None:
    with casts(half=[listed]):
        for call in (torch.softmax, functional.softmax, Tensor.softmax, torch.special.softmax):
            assert call(x(), dim=0).dtype == FP16
        assert nn.Softmax(0)(x()).dtype == FP16


def test_operators_count_as_the_functions_they_call() -> None:
    with casts(half=[torch.matmul, torch.mul, torch.div, torch.pow, torch.sub]):
        results = [x() @ x(), x() * 2, 2 * x(), x() / 3, 3 / x(), x() ** 2, 2 ** x(), x() - 1, 1 - x()]
    assert {result.dtype for result in results} == {FP16}


@pytest.mark.parametrize("listed", [Tensor.__matmul__, Tensor.__rmatmul__, torch.matmul])
def test_an_operator_may_be_listed_itself(listed: Any) -> None:
    with casts(half=[listed]):
        assert (x() @ x()).dtype == FP16
        assert torch.matmul(x(), x()).dtype == FP16


def test_what_is_listed_wins_over_autocast() -> None:
    with autocast(), casts(half=[functional.mse_loss], float=[functional.linear], promote=[torch.mm]):
        assert functional.mse_loss(x(), x()).dtype == FP16
        assert functional.linear(x(FP16), x()).dtype == FP32
        assert torch.mm(x(FP16), x()).dtype == FP32
        assert torch.matmul(x(), x()).dtype == FP16


def test_half_is_autocasts_type_where_autocast_is_on_and_fp16_elsewhere() -> None:
    with casts(half=[torch.relu]):
        assert torch.relu(x()).dtype == FP16
        with autocast(BF16):
            assert torch.relu(x()).dtype == BF16
    with autocast(BF16), casts(half=[torch.relu], dtype=FP16):
        assert torch.relu(x()).dtype == FP16


def test_a_function_of_a_library_is_caught_in_every_module_that_knows_it() -> None:
    with casts(half=[library.types_of]):
        assert library.types_of(x()) == [FP16]
        assert types_of(x()) == [FP16]
    assert library.types_of(x()) == types_of(x()) == [FP32]


def test_tensors_are_cast_at_any_depth_and_nothing_else_is() -> None:
    Pair = namedtuple("Pair", "left right")
    integers, mask = torch.arange(3), torch.ones(2, dtype=torch.bool)
    with casts(half=[types_of]):
        found = types_of([x(), (x(BF16),)], Pair(x(), 1.5), mask, a={"b": {"c": x()}}, n=integers, z=x(torch.complex64))
    assert found == [FP16, FP16, FP16, torch.bool, FP16, torch.int64, torch.complex64]


def test_float64_is_left_alone_except_that_it_promotes() -> None:
    with casts(half=[torch.relu], float=[torch.cumsum], promote=[types_of]):
        assert torch.relu(x(FP64)).dtype == FP64
        assert torch.cumsum(x(FP64), 0).dtype == FP64
        assert types_of(x(FP64), x(FP16)) == [FP64, FP64]


def test_a_container_with_nothing_to_cast_is_passed_on_itself() -> None:
    found: list[str] = []
    with casts(half=[library.append_to]):
        library.append_to(x(), found)
    assert found == ["seen"]


def test_out_is_left_alone() -> None:
    out = torch.empty(4, 4)
    with casts(half=[torch.mul]):
        torch.mul(x(), 2, out=out)
    a = torch.full((4, 4), 0.1)
    with casts(half=[torch.mul]):
        torch.mul(a, 2, out=out)
    assert torch.equal(out, (a.half() * 2).float())


def test_a_method_of_a_class_is_caught_and_uses_its_float32_weights_under_autocast() -> None:
    layer = library.Layer()
    with autocast(), casts(half=[library.Layer.forward]):
        assert layer(x()).dtype == FP16
        assert layer.seen == FP16
    assert layer(x()).dtype == FP32


def test_a_method_listed_under_float_runs_with_autocast_off() -> None:
    layer = library.Layer()
    with autocast(), casts(float=[library.Layer.forward]):
        assert layer(x(FP16)).dtype == FP32
        assert layer.linear(x(FP16)).dtype == FP16


def test_torch_functions_inside_a_listed_python_function_are_cast_too() -> None:
    with casts(half=[library.product], float=[torch.matmul]):
        assert library.product(x(), x()).dtype == FP32


@pytest.mark.parametrize("auto", [False, True])
def test_gradients_come_back_in_the_type_of_the_input(auto: bool) -> None:
    a, b = x().requires_grad_(), x(FP16).requires_grad_()
    with autocast(dtype=FP16, enabled=auto), casts(half=[torch.matmul], float=[library.product]):
        (torch.matmul(a, b).sum() + library.product(a, b).sum()).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.dtype, b.grad.dtype) == (FP32, FP16)
    expected = 2 * b.detach().float().sum(1).expand(4, 4)
    torch.testing.assert_close(a.grad, expected, rtol=1e-3, atol=1e-3)


def test_the_inner_context_decides_and_the_outer_one_holds_again_after_it() -> None:
    with casts(half=[torch.relu, types_of, torch.tanh]):
        with casts(float=[torch.relu, types_of]):
            assert torch.relu(x(FP16)).dtype == FP32
            assert types_of(x(FP16)) == [FP32]
            assert torch.tanh(x()).dtype == FP16
        assert torch.relu(x()).dtype == FP16
        assert types_of(x()) == [FP16]


def test_only_one_of_several_contexts_casts_a_call() -> None:
    again = casts(half=[torch.relu])
    with autocast(BF16), casts(half=[torch.relu]), again, again:
        assert torch.relu(x()).dtype == BF16


def test_a_context_can_be_entered_again_also_inside_itself() -> None:
    both = casts(half=[torch.relu, types_of])
    for _ in range(2):
        with both, both:
            assert torch.relu(x()).dtype == FP16
            assert types_of(x()) == [FP16]
        assert torch.relu(x()).dtype == FP32
        assert types_of(x()) == [FP32]


def test_a_context_made_inside_another_finds_the_function_behind_its_stand_in() -> None:
    with casts(half=[library.types_of]):
        with casts(float=[library.types_of]):
            assert library.types_of(x(FP16)) == [FP32]
        assert library.types_of(x()) == [FP16]


def test_it_is_a_decorator_too() -> None:
    @casts(half=[torch.relu])
    def run(value: Tensor) -> Tensor:
        return torch.relu(value)

    assert run(x()).dtype == FP16
    assert torch.relu(x()).dtype == FP32


def test_an_exception_leaves_everything_as_it_was() -> None:
    before = library.fail, library.Layer.forward
    with pytest.raises(KeyError, match="on purpose"), casts(half=[library.fail, library.Layer.forward, torch.relu]):
        library.fail(x())
    assert (library.fail, library.Layer.forward) == before
    assert torch.relu(x()).dtype == FP32


def test_other_threads_are_not_affected() -> None:
    found: list[Any] = []

    def look() -> None:
        found.extend([torch.relu(x()).dtype, library.types_of(x())])

    with casts(half=[torch.relu, library.types_of]):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [FP32, [FP32]]


def test_a_function_stays_caught_while_another_thread_is_still_inside() -> None:
    entered, leave = threading.Event(), threading.Event()
    found: list[Any] = []

    def stay() -> None:
        with casts(half=[library.types_of]):
            entered.set()
            leave.wait(10)
            found.extend(library.types_of(x()))

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(10)
    with casts(float=[library.types_of]):
        assert library.types_of(x(FP16)) == [FP32]
    leave.set()
    thread.join()
    assert found == [FP16]
    assert library.types_of(x()) == [FP32]


def test_calls_without_floating_tensors_pass() -> None:
    with casts(half=[types_of, torch.cat], promote=[torch.add]):
        assert types_of(3, "a") == []
        assert torch.cat([torch.arange(2)]).dtype == torch.int64
        assert torch.add(torch.arange(2), 1).tolist() == [1, 2]


def test_a_compiled_function_is_cast_inside_and_not_outside() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(value: Tensor) -> Tensor:
        return torch.relu(value) * 2

    with casts(half=[torch.relu]):
        assert run(x()).dtype == FP16
    assert run(x()).dtype == FP32


def test_a_decorated_function_is_cast_when_it_is_computed_again_for_the_backward_pass() -> None:
    seen: list[torch.dtype] = []

    @casts(half=[torch.relu])
    def block(value: Tensor) -> Tensor:
        seen.append(torch.relu(value).dtype)
        return torch.tanh(torch.relu(value)).float()

    checkpoint(block, x().requires_grad_(), use_reentrant=False).sum().backward()
    assert seen == [FP16, FP16]
