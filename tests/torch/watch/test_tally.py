"""`tally` counts a tensor by the powers of two of its numbers, exactly as numpy's reference does, with its largest."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscale.histogram import exponent_histogram
from gradscale.kernels.torch_exponents import tally
from gradscale.torch.gradients import numbers_of


def check(tensor: Tensor, scale: float = 1.0, divided: Tensor | None = None) -> None:
    """Compares what is counted of a tensor with numpy's reference, exactly."""
    found = tally(numbers_of(tensor.detach()), scale)
    values = tensor.detach() if divided is None else divided
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    array = (values.coalesce().values() if values.is_sparse else values).cpu().double().numpy()
    assert found.histogram.to_dict() == exponent_histogram(array).to_dict()
    largest = float(np.max(np.abs(array), initial=0.0))
    assert found.amax == largest or (math.isnan(found.amax) and math.isnan(largest))
    assert (found.dtype, found.scale) == (tensor.dtype, scale)


def normal(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(7)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0, 1.0],
        [0.0, -0.0],
        [1e-40, -3e-45, 0.0, 2.0],
        [math.inf, -math.inf, 1.0, 0.0],
        [math.nan, 1.0, math.inf],
        [3.4028234663852886e38, 1.1754943508222875e-38, -1e-45],
    ],
)
def test_special_numbers_are_counted(values: list[float]) -> None:
    check(torch.tensor(values))


@pytest.mark.not_simulated("numbers of these types and layouts")
def test_any_type_and_layout_is_counted() -> None:
    wide = normal(6, 8)
    for tensor in (
        *(wide.to(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2)),
        *(wide.t(), wide[::2, 1::3], wide[0, 0], wide[:0]),
        torch.complex(wide, -wide),
        torch.complex(wide, wide * 4).conj(),
        torch.complex(wide, wide * 8).conj().imag,
        torch.nn.Parameter(wide),
        torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), wide[:3], (4, 8), check_invariants=True),
    ):
        check(tensor)


@pytest.mark.parametrize("scale", [2.0**-20, 8.0, 2.0**16, 1000.0])
def test_numbers_are_divided_by_the_scale_in_float32(scale: float) -> None:
    check(normal(500), scale, normal(500) / scale)
    check(normal(3).half(), scale, normal(3).half().float() / scale)
