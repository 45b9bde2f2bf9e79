"""Exponent histograms of tensors have exactly the counts of numpy's, whatever the type, layout and size."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from gradscale import histogram as reference
from gradscale.kernels.torch_exponents import CHUNK
from gradscale.torch.histogram import block_histogram, exponent_histogram

pytestmark = pytest.mark.not_simulated("counts of exponents: the device has no `bincount`")


def assert_same(found: reference.ExponentHistogram, expected: reference.ExponentHistogram) -> None:
    assert found.to_dict() == expected.to_dict()


def every_pattern(dtype: type) -> np.ndarray:
    return np.arange(2 ** (8 * np.dtype(dtype).itemsize)).astype(f"uint{8 * np.dtype(dtype).itemsize}").view(dtype)


def tensor_of(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(values.view(f"int{8 * values.itemsize}")).view(dtype)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        (np.float16, torch.float16),
        (ml_dtypes.bfloat16, torch.bfloat16),
        (ml_dtypes.float8_e5m2, torch.float8_e5m2),
        (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_every_bit_pattern_of_narrow_types_is_counted(dtype: type, torch_dtype: torch.dtype) -> None:
    values = every_pattern(dtype)
    assert_same(exponent_histogram(tensor_of(values, torch_dtype)), reference.exponent_histogram(values))


def test_bit_patterns_of_float32_are_counted_subnormals_included() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, CHUNK + 12_345, np.uint32)
    bits[:20_000] &= 0x807FFFFF  # subnormal numbers
    bits[-4:] = 0, 2**31, 1, 0x7F800000
    values = bits.view(np.float32)
    assert_same(exponent_histogram(torch.from_numpy(values)), reference.exponent_histogram(values))


def test_each_power_of_two_of_float32_and_its_neighbors_are_counted() -> None:
    powers = np.float32(2.0) ** np.arange(-149, 128).astype(np.float32)
    values = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    assert_same(exponent_histogram(torch.from_numpy(values)), reference.exponent_histogram(values))


def test_float64_is_counted_by_its_own_exponent_and_beyond_float32_in_the_end_bins() -> None:
    bits = np.random.default_rng(0).integers(0, 2**63, 50_000, np.uint64)
    bits[:1000] &= 2**52 - 1
    bits[:2] = 0, 2**63
    values = np.concatenate([bits.view(np.float64), [np.nextafter(2.0, 0), np.nextafter(2.0**-149, 0)]])
    assert_same(exponent_histogram(torch.from_numpy(values)), reference.exponent_histogram(values))


def layouts() -> dict[str, Tensor]:
    values = torch.randn(3, 700, 300, generator=torch.Generator().manual_seed(0))
    return {
        "contiguous": values,
        "transposed": values.transpose(0, 2),
        "strided": values[:, ::2, ::3],
        "expanded": values[:1].expand(3, -1, -1),
        "empty": values[:0],
        "without dimensions": values[0, 0, 0],
    }


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_is_counted_whole(layout: str) -> None:
    tensor = layouts()[layout]
    assert_same(exponent_histogram(tensor), reference.exponent_histogram(tensor.numpy()))


def test_sparse_and_complex_tensors_count_their_numbers() -> None:
    places, numbers = torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 1.0, 4.0])
    sparse = torch.sparse_coo_tensor(places, numbers, (5,), check_invariants=True)
    pair = torch.tensor([1 + 4j]).conj()
    values = np.array([2.0, 4.0, 1.0, -4.0], np.float32)
    assert_same(exponent_histogram([sparse, pair]), reference.exponent_histogram(values))


def test_no_tensors_have_an_empty_histogram() -> None:
    assert_same(exponent_histogram([]), reference.exponent_histogram([]))


def test_an_integer_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"floating-point tensors\. Received: one of torch\.int64"):
        exponent_histogram(torch.arange(3))


@pytest.mark.parametrize("block", [16, 32, 7])
@pytest.mark.parametrize("shape", [(7, 100), (3, 5, 33), (900, 600), (2, 300_000), (5, 0), (0, 5), (), (3,)])
def test_blocks_are_counted_as_in_numpy(shape: tuple[int, ...], block: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = values * (values > 0.7)
    if values.numel() > 100:
        values.view(-1)[3], values.view(-1)[50] = torch.nan, -torch.inf
    for tensor in (values, values.T if values.dim() == 2 else values, values.bfloat16().float(), values.double()):
        assert_same(block_histogram(tensor, block), reference.block_histogram(tensor.numpy(), block))


def test_blocks_of_a_complex_tensor_are_those_of_its_parts() -> None:
    values = torch.complex(torch.arange(1.0, 7.0), torch.arange(11.0, 17.0)).view(2, 3)
    assert_same(block_histogram(values, 2), reference.block_histogram(values.numpy(), 2))


def test_a_large_tensor_is_counted_without_a_copy_of_it() -> None:
    from torch.profiler import ProfilerActivity, profile

    tensor = torch.ones(16 * CHUNK)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        exponent_histogram(tensor)
    allocated = [event.nbytes() for event in _allocations(recorded)]
    assert 0 < max(allocated) <= 8 * CHUNK


def _allocations(recorded: Any) -> list[Any]:
    events = recorded.profiler.kineto_results.events()
    return [event for event in events if event.name() == "[memory]"]
