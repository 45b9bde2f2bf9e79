"""What lies between products: what is rounded in FP16 and BF16, what is float32, and what stays float32 in FP8."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.torch.emulation.operations import are_of
from torch import Tensor

from gradscale.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, TF32, Format
from gradscale.torch import emulate


def product() -> Tensor:
    """Returns the result of a product, which is low precision in a block."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 24, generator=generator), torch.randn(8, 24, generator=generator)
    return F.linear(x, w)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "times a number": lambda y: y * 0.3,
    "plus itself": lambda y: y + y / 3,
    "plus a float32 tensor without dimensions": lambda y: y + torch.tensor(1e-3),
    "mean": lambda y: y.mean(0),
    "dropout": lambda y: F.dropout(y, 0.3),
    "a view": lambda y: y.T.unflatten(1, (2, 3)) / 3,
    "an index": lambda y: y[:, 2:5] / 3,
    "parts": lambda y: y.chunk(2)[1] / 3,
    "a clone": lambda y: y.clone() / 3,
    "a detached one": lambda y: y.detach() / 3,
    "the largest, with its place": lambda y: y.max(0).values / 3,
    "concatenation": lambda y: torch.cat([y, y]) / 3,
    "batch norm": lambda y: F.batch_norm(y, torch.zeros(8), torch.ones(8), torch.rand(8), torch.rand(8)),
    "in place": lambda y: y.mul_(0.3),
    "in place by operator": lambda y: y.__imul__(0.3),
    "put into": lambda y: _put(y),
    "to where it is": lambda y: y.to("cpu") / 3,
    "to what it is": lambda y: y.type_as(y) / 3,
    "a float32 tensor to its type": lambda y: (y.float() / 3).type_as(y),
    "a float32 tensor to what it is": lambda y: (y.float() / 3).to(y) / 3,
    "zeros like it": lambda y: torch.zeros_like(y).add_(0.3),
}

FLOAT32: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda y: y.softmax(-1),
    "exp": torch.exp,
    "a power": lambda y: y.abs() ** 0.3,
    "sum": lambda y: y.sum(0) / 3,
    "norm": lambda y: y.norm(dim=0),
    "layer norm": lambda y: F.layer_norm(y, (8,)),
    "cross-entropy": lambda y: F.cross_entropy(y, torch.arange(6)).view(1),
    "mean squared error": lambda y: F.mse_loss(y, torch.ones(6, 8)).view(1),
    "plus a float32 tensor": lambda y: y + torch.full((8,), 1e-3),
    "in place on a float32 tensor": lambda y: torch.full((6, 8), 1e-3).add_(y),
    "float": lambda y: y.float() / 3,
    "mean in float32": lambda y: y.mean(0, dtype=torch.float32),
    "type float32": lambda y: y.type(torch.float32) / 3,
    "to float32": lambda y: y.to(torch.float32) / 3,
    "to the type of a float32 tensor": lambda y: y.type_as(torch.ones(1)) / 3,
    "to what a float32 tensor is": lambda y: y.to(torch.ones(1)) / 3,
}


def _put(y: Tensor) -> Tensor:
    y[0] = 1 / 3
    return y


@pytest.mark.parametrize("known", [FP16, BF16], ids=lambda known: known.name)
@pytest.mark.parametrize("name", ROUNDED)
def test_a_function_of_narrow_tensors_gives_numbers_of_the_format(name: str, known: Format) -> None:
    with emulate(known):
        found = ROUNDED[name](product())
        assert are_of(found, known)
    assert not are_of(ROUNDED[name](product()), known)


@pytest.mark.parametrize("name", FLOAT32)
def test_a_function_on_the_float32_list_or_given_float32_gives_float32(name: str) -> None:
    with emulate(FP16):
        low = product()
        before = low.clone()
        found = FLOAT32[name](low)
    assert not are_of(found, FP16)
    torch.testing.assert_close(found, FLOAT32[name](before), rtol=1e-6, atol=0)


@pytest.mark.parametrize("known", [FP8_E4M3, FP8_E5M2, TF32], ids=lambda known: known.name)
@pytest.mark.parametrize("name", ROUNDED)
def test_in_formats_without_arithmetic_of_their_own_only_products_are_rounded(name: str, known: Format) -> None:
    with emulate(known):
        low = product()
        assert are_of(low, known)
        torch.manual_seed(1)
        found = ROUNDED[name](low.clone())
    torch.manual_seed(1)
    assert torch.equal(found, ROUNDED[name](low.clone()))


def test_a_kept_result_is_the_rounded_one_so_that_its_gradient_is_that_of_fp16() -> None:
    x, w = torch.full((1, 1), 3.7, requires_grad=True), torch.ones(1, 1)
    with emulate(FP16):
        y = F.linear(x, w).tanh()
    y.sum().backward()
    result = torch.tensor(3.7).half().float().tanh().half().float()
    assert y.item() == result.item()
    assert x.grad is not None
    assert x.grad.item() == (1 - result * result).half().float().item()


def test_prelu_is_low_precision_of_float32_arguments_too_but_not_in_fp8() -> None:
    x, w = torch.randn(4, 8), torch.rand(8)
    for known in (FP16, BF16):
        with emulate(known):
            assert are_of(F.prelu(x, w), known)
            assert are_of(torch.nn.PReLU()(x) / 3, known)
    with emulate(FP8_E4M3):
        assert torch.equal(F.prelu(x, w), torch.where(x > 0, x, w * x))


def test_a_view_of_a_narrow_tensor_is_still_a_view() -> None:
    with emulate(FP16):
        y = product()
        y.view(-1)[0] = 7.0
        y.T[1] = 5.0
    assert y[0, 0] == 7.0
    assert y[:, 1].tolist() == [5.0] * 6


def test_a_float32_tensor_without_dimensions_is_never_changed_by_what_it_is_used_in() -> None:
    scale = torch.tensor(1 / 3)
    with emulate(FP16):
        y = product()
        for use in (lambda: scale.expand_as(y), lambda: scale.type_as(y), lambda: y * scale, lambda: y.add_(scale)):
            use()
    assert scale.item() == torch.tensor(1 / 3).item()


def test_operands_are_never_changed() -> None:
    x, w = torch.randn(4, 5), torch.randn(3, 5)
    kept = x.clone(), w.clone()
    with emulate(FP8_E4M3):
        F.linear(x, w)
        torch.einsum("ij->ji", x)
    assert torch.equal(x, kept[0])
    assert torch.equal(w, kept[1])


def test_embeddings_are_rounded_and_their_sum_with_others_stays_float32() -> None:
    table = torch.randn(5, 8, requires_grad=True)
    with emulate(FP16):
        rows = F.embedding(torch.tensor([1, 2]), table)
        total = rows + F.linear(rows, torch.randn(8, 8))
    assert are_of(rows, FP16)
    assert not are_of(total, FP16)
    (rows * 1e-9).sum().backward()
    assert table.grad is not None
    assert not table.grad.any()


def test_a_mask_of_minus_infinity_works_in_a_format_that_has_none() -> None:
    q, k, v = (torch.randn(1, 4, 8) for _ in range(3))
    mask = torch.full((4, 4), -torch.inf).triu(1)
    with emulate(FP8_E4M3):
        by_name = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        by_place = F.scaled_dot_product_attention(q, k, v, mask)
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(by_name, by_place)
    assert torch.equal(by_name, causal)
    assert are_of(causal, FP8_E4M3)


def test_a_result_of_one_block_is_low_precision_in_the_next_of_that_format_alone() -> None:
    with emulate(FP16):
        y = product()
    with emulate(FP16):
        assert are_of(y * 0.3, FP16)
    with emulate(BF16):
        assert not are_of(y * 0.3, BF16)
