"""Emulated FP16 and BF16 against real autocast: the same operations, forward and backward, agree within rounding."""

from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from examples.demo.with_torch import GPT
from tests.torch.emulation.operations import LAYERS, PRODUCTS, SUMS, are_of, distance, steps_apart
from torch import Tensor, nn

from gradscale.formats import BF16, FP8_E4M3, FP16, Format
from gradscale.torch import emulate

pytestmark = pytest.mark.cpu_only("the CPU's own autocast is the model")

DTYPES = {FP16: torch.float16, BF16: torch.bfloat16}

FORMATS = pytest.mark.parametrize("known", DTYPES, ids=lambda known: known.name)


def autocast(known: Format) -> torch.autocast:
    return torch.autocast("cpu", dtype=DTYPES[known])


@FORMATS
@pytest.mark.parametrize("name", SUMS)
def test_a_product_is_at_most_one_step_from_autocast_and_most_are_equal(name: str, known: Format) -> None:
    found, expected = PRODUCTS[name].results(emulate(known)), PRODUCTS[name].results(autocast(known))
    for one, other in zip(found, expected, strict=True):
        apart = steps_apart(one, other, known)
        assert apart.max() <= 1
        assert (apart > 0).double().mean() < 0.1


@FORMATS
@pytest.mark.parametrize("name", [*PRODUCTS, *LAYERS])
def test_an_operation_is_within_one_step_of_autocast_on_the_whole(name: str, known: Format) -> None:
    operation = (PRODUCTS | LAYERS)[name]
    found, expected = operation.results(emulate(known)), operation.results(autocast(known))
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < 2.0**-known.mantissa_bits


@FORMATS
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_and_gradients_of_a_product_are_numbers_of_the_format(name: str, known: Format) -> None:
    for tensor in PRODUCTS[name].results(emulate(known)):
        assert are_of(tensor, known)


def gradients(model: nn.Module, context: AbstractContextManager[object], *inputs: Tensor) -> list[Tensor]:
    """Returns what the model gives, and the gradients of its parameters."""
    model.zero_grad()
    with context:
        found = model(*inputs)
    found = found[0] if isinstance(found, tuple) else found
    found.float().square().mean().backward()
    return [found.detach().float(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


MODELS = {
    "attention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), ((2, 5, 16),) * 3),
    "GRU cell": (lambda: nn.GRUCell(8, 16), ((3, 8), (3, 16))),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, norm_first=True), ((5, 2, 16),)),
    "CNN": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
        ),
        ((2, 3, 9, 9),),
    ),
}


@FORMATS
@pytest.mark.parametrize("name", MODELS)
def test_a_model_makes_the_gradients_that_autocast_makes(name: str, known: Format) -> None:
    make, shapes = MODELS[name]
    model, inputs = make(), [torch.randn(shape) for shape in shapes]
    found, expected = (gradients(model, context, *inputs) for context in (emulate(known), autocast(known)))
    assert (
        max(distance(one, other) for one, other in zip(found, expected, strict=True)) < 10 * 2.0**-known.mantissa_bits
    )


def test_attention_written_in_python_is_rounded_at_each_of_its_products() -> None:
    attention, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    with emulate(FP8_E4M3):
        found, _ = attention(x, x, x, need_weights=False)
        joined = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        q, k, v = joined.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        expected = attention.out_proj(mixed)
    assert torch.equal(found, expected)


def test_an_lstm_makes_the_gradients_that_autocast_makes() -> None:
    model, x = nn.LSTM(8, 16), torch.randn(5, 3, 8)  # FP16 has none on a CPU
    found = gradients(model, emulate(BF16), x)
    try:
        expected = gradients(model, autocast(BF16), x)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("torch has no LSTM in BF16 for this CPU")
    assert max(distance(one, other) for one, other in zip(found, expected, strict=True)) < 10 * 2.0**-BF16.mantissa_bits


@FORMATS
def test_a_gpt_makes_the_gradients_that_autocast_makes(known: Format) -> None:
    model, text = GPT(vocabulary=50, length=16, width=32, heads=4, depth=2), torch.randint(50, (4, 16))
    found, expected = (gradients(model, context, text) for context in (emulate(known), autocast(known)))
    assert (
        max(distance(one, other) for one, other in zip(found, expected, strict=True)) < 50 * 2.0**-known.mantissa_bits
    )
