"""`tally` counts a tensor by the powers of two of its numbers, exactly as numpy's reference does."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscale.histogram import exponent_histogram
from gradscale.kernels.torch_exponents import tally
from gradscale.torch.gradients import numbers_of
from gradscale.watching.rows import Tally


def counted(tensors: list[Tensor], scale: float = 1.0) -> list[Tally]:
    return [tally(numbers_of(tensor.detach()), scale) for tensor in tensors]


def array_of(tensor: Tensor) -> np.ndarray:
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (values.coalesce().values() if values.is_sparse else values).detach().cpu().double().numpy()


def check(found: Tally, array: np.ndarray, bits: int = 0) -> None:
    """Compares what was counted of a tensor with numpy's reference, exactly."""
    expected = exponent_histogram(np.asarray(array) * np.asarray([2.0**bits]))
    assert found.histogram.to_dict() == expected.to_dict()
    largest = float(np.max(np.abs(array), initial=0.0)) * 2.0**bits
    assert found.amax == largest or (math.isnan(found.amax) and math.isnan(largest))


def normal(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(7)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def test_small_tensors_are_counted_as_each_alone() -> None:
    tensors = [normal(3, 4) * 10.0**power for power in range(-30, 30, 3)]
    found = counted(tensors)
    for each, tensor in zip(found, tensors, strict=True):
        check(each, array_of(tensor))


SPECIAL = {
    "zeros of both signs": [0.0, -0.0, 1.0],
    "nothing but zeros": [0.0, -0.0],
    "subnormal": [1e-40, -3e-45, 0.0, 2.0],
    "infinite": [math.inf, -math.inf, 1.0, 0.0],
    "NaN": [math.nan, 1.0, math.inf],
    "the largest and the smallest": [3.4028234663852886e38, 1.1754943508222875e-38, -1e-45],
}


@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL)
def test_special_numbers_are_counted_in_their_own_tensor_alone(values: list[float]) -> None:
    tensors = [normal(5), torch.tensor(values), torch.zeros(3), normal(2, 2)]
    found = counted(tensors)
    for each, tensor in zip(found, tensors, strict=True):
        check(each, array_of(tensor))


def test_every_bit_pattern_of_fp16_is_counted() -> None:
    patterns = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.float16)
    # As two tensors: together they are too large to be copied.
    parts = [part.to(torch.get_default_device()) for part in patterns.split(2**15)]
    found = counted(parts)
    for each, part in zip(found, parts, strict=True):
        check(each, array_of(part))


@pytest.mark.not_simulated("numbers of these types and layouts")
def test_any_type_and_layout_is_counted() -> None:
    wide = normal(6, 8)
    tensors = [
        *(wide.to(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2)),
        wide.t(),
        wide[::2, 1::3],
        wide[0, 0],
        wide[:0],
        torch.complex(wide, -wide),
        torch.complex(wide, wide * 4).conj(),
        torch.complex(wide, wide * 8).conj().imag,
        torch.nn.Parameter(wide),
        torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), wide[:3], (4, 8), check_invariants=True),
    ]
    found = counted(tensors)
    for each, tensor in zip(found, tensors, strict=True):
        check(each, array_of(tensor))


@pytest.mark.parametrize("power", [-20, 3, 16])
def test_a_scale_that_is_a_power_of_two_divides_exactly(power: int) -> None:
    tensors = [normal(9), normal(3).half()]
    found = counted(tensors, 2.0**power)
    for each, tensor in zip(found, tensors, strict=True):
        check(each, array_of(tensor), -power)


def test_any_other_scale_divides() -> None:
    tensor = normal(500)
    found = counted([tensor], 1000.0)
    check(found[0], array_of(tensor / 1000.0))


def test_counting_does_not_change_the_tensor() -> None:
    tensor = -normal(6).abs()
    before = tensor.clone()
    counted([tensor])
    assert torch.equal(tensor, before)
