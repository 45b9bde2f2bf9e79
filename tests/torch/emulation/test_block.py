"""The block itself: where it applies, what it does not change, and its errors."""

import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.torch.emulation.operations import are_of
from tests.torch.versions import needs_batched_view
from torch import Tensor

from gradscale.formats import BF16, FP4_E2M1, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Format
from gradscale.torch import emulate

pytestmark = pytest.mark.cpu_only("emulated formats are compared with numpy and the CPU")


def product(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.linear(torch.randn(3, 24, generator=generator).to(dtype), torch.ones(2, 24, dtype=dtype) / 3)


@pytest.mark.parametrize("known", [TF32, BF16, FP16, FP8_E4M3, FP8_E5M2, FP4_E2M1], ids=lambda known: known.name)
def test_a_product_is_the_float32_product_of_rounded_operands_rounded(known: Format) -> None:
    x, w = torch.randn(4, 9), torch.randn(5, 9)
    with emulate(known):
        found = F.linear(x, w)
    narrow_x, narrow_w = (torch.from_numpy(known.round(operand.numpy())) for operand in (x, w))
    assert torch.equal(found, torch.from_numpy(known.round(F.linear(narrow_x, narrow_w).numpy())))


def test_gradients_are_rounded_to_their_own_format_on_entering_and_on_leaving() -> None:
    x, w = torch.randn(4, 9, requires_grad=True), torch.randn(5, 9, requires_grad=True)
    with emulate("e4m3", "e5m2"):
        y = F.linear(x, w)
    grad = torch.randn(4, 5)
    y.backward(grad)
    entering = torch.from_numpy(FP8_E5M2.round(grad.numpy()))
    by_x = entering @ torch.from_numpy(FP8_E4M3.round(w.detach().numpy()))
    by_w = entering.T @ torch.from_numpy(FP8_E4M3.round(x.detach().numpy()))
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(x.grad, torch.from_numpy(FP8_E5M2.round(by_x.numpy())))
    assert torch.equal(w.grad, torch.from_numpy(FP8_E5M2.round(by_w.numpy())))
    assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.float32)


def test_gradients_have_the_format_of_values_unless_given() -> None:
    x = torch.ones(1, 1, requires_grad=True)
    with emulate("fp16"):
        y = F.linear(x, torch.ones(1, 1))
    (y * 2.0**-26).backward()
    assert x.grad is not None
    assert x.grad.item() == 0.0


@pytest.mark.parametrize(
    ("known", "value", "expected"), [("fp16", 1e5, torch.inf), ("e5m2", 1e5, torch.inf), ("e4m3", 1e3, torch.nan)]
)
def test_overflow_of_values_and_gradients_is_as_the_format_has_it(known: str, value: float, expected: float) -> None:
    x = torch.ones(1, 1, requires_grad=True)
    with emulate(known):
        y = F.linear(x, torch.ones(1, 1)) + 0
        large = F.linear(torch.full((1, 1), value), torch.ones(1, 1))
    y.backward(torch.full((1, 1), value))
    assert x.grad is not None
    torch.testing.assert_close(torch.stack([large, x.grad]).flatten(), torch.tensor([expected] * 2), equal_nan=True)


@pytest.mark.parametrize("grads", [False, True])
def test_values_and_gradients_saturate_each_where_asked(grads: bool) -> None:
    x = torch.full((1, 1), 1e6, requires_grad=True)
    with emulate("e5m2", saturate=not grads, saturate_grads=grads):
        y = F.linear(x, torch.ones(1, 1))
    y.backward(torch.full((1, 1), 1e6))
    assert x.grad is not None
    assert [y.item(), x.grad.item()] == ([torch.inf, 57344.0] if grads else [57344.0, torch.inf])


def test_nothing_is_rounded_before_and_after_the_block_even_after_an_error() -> None:
    def fail() -> None:
        with emulate("e4m3"):
            raise KeyboardInterrupt

    expected = product()
    with emulate("e4m3"):
        assert not torch.equal(product(), expected)
    assert torch.equal(product(), expected)
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert torch.equal(product(), expected)


def test_the_innermost_block_counts_and_the_outer_one_again_after_it() -> None:
    with emulate("fp16"):
        outer = product()
    with emulate("e4m3"):
        inner = product()
        with emulate("fp16"):
            assert torch.equal(product(), outer)
            with emulate("e4m3"):
                assert torch.equal(product(), inner)
            with emulate("fp32"):
                assert not are_of(product(), FP16)
            assert torch.equal(product(), outer)
        assert torch.equal(product(), inner)


def test_one_emulation_can_be_entered_twice_and_used_again() -> None:
    emulation = emulate("e4m3")
    with emulation:
        expected = product()
        with emulation:
            assert torch.equal(product(), expected)
        assert torch.equal(product(), expected)
    with emulation:
        assert torch.equal(product(), expected)


def test_a_decorated_function_is_emulated() -> None:
    with emulate("e4m3"):
        expected = product()
    assert torch.equal(emulate("e4m3")(product)(), expected)


def test_a_block_holds_for_its_own_thread_alone() -> None:
    found: list[Tensor] = []
    expected = product()
    with emulate("e4m3"):
        thread = threading.Thread(target=lambda: found.append(product()))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_tensors_that_are_not_float32_are_left_alone(dtype: torch.dtype) -> None:
    expected = product(dtype)
    with emulate("e4m3"):
        found = product(dtype)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_integers_and_sparse_operands_are_left_alone() -> None:
    numbers, sparse = torch.arange(9).view(3, 3), torch.rand(3, 3).to_sparse()
    with emulate("e4m3"):
        assert torch.equal(numbers @ numbers, torch.tensor(numbers.numpy() @ numbers.numpy()))
        found = sparse @ torch.eye(3)
    assert torch.equal(found, torch.from_numpy(FP8_E4M3.round(sparse.to_dense().numpy())))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_values_are_the_same(off: type[torch.no_grad]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with emulate("fp16"):
        expected = model(x)
        with off():
            found = model(x)
    assert not found.requires_grad
    assert torch.equal(found, expected)


def test_fp32_changes_nothing() -> None:
    expected = product()
    with emulate(FP32):
        assert torch.equal(product(), expected)


@pytest.mark.parametrize("autocast_first", [True, False])
@pytest.mark.parametrize("known", ["fp16", "e4m3"])
def test_autocast_around_the_block_or_in_it_changes_nothing(known: str, autocast_first: bool) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)), torch.randn(3, 4)

    def run(*contexts: Any) -> list[Tensor]:
        model.zero_grad()
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            found = model(x)
        found.square().sum().backward()
        return [found, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]

    contexts = [emulate(known), torch.autocast("cpu", dtype=torch.bfloat16)]
    found, expected = run(*(contexts[::-1] if autocast_first else contexts)), run(emulate(known))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16), emulate("fp32"):
        assert model(x).dtype is torch.bfloat16  # the block rounds nothing


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's `clamp_`
@pytest.mark.parametrize(
    "known", [FP16, pytest.param(FP8_E4M3, marks=needs_batched_view)], ids=lambda known: known.name
)
def test_vmap_gives_what_a_batch_gives(known: Format) -> None:
    # Small integers and powers of two, so that sums are exact in any order.
    x, w = torch.randint(-8, 8, (7, 4)) / 3, torch.randint(-2, 3, (5, 4)).float()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, w).square().sum()

    with emulate(known):
        assert torch.equal(torch.vmap(lambda row: F.linear(row, w))(x), F.linear(x, w))
        found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
        expected = torch.stack([torch.func.grad(loss)(w, row) for row in x])
    assert torch.equal(found, expected)
    assert are_of(found, known)


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`rounding` must be one of nearest, stochastic\. Received: rounding='up'\."):
        emulate("fp16", rounding="up")  # type: ignore[arg-type]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"There is no format of that name\. Received: 'fp7'"):
        emulate("fp16", "fp7")
