"""The storages of master weights: what is restored of a float32 value, and what the weight is."""

import pytest
import torch
from tests.torch.masters.helpers import HALF_DTYPES, STORAGES
from torch import Tensor

from gradscale.kernels.torch_storage import (
    Kahan,
    MasterStorage,
    Remainder,
    Stochastic,
    make_storage,
    refined,
)
from gradscale.torch.masters import Storage, bytes_per_parameter

BF16, FP16 = torch.bfloat16, torch.float16


def all_patterns(dtype: torch.dtype) -> Tensor:
    """Returns all 65,536 numbers of a 16-bit type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def finite_patterns(dtype: torch.dtype) -> Tensor:
    numbers = all_patterns(dtype)
    return numbers[numbers.isfinite()]


def near(weights: Tensor) -> Tensor:
    """Returns float32 values around weights: themselves, their neighbors, ties and what is beside ties."""
    bits = weights.float().view(torch.int32)
    offsets = [
        0,
        1,
        -1,
        4095,
        4096,
        4097,
        -4095,
        -4096,
        -4097,
        32767,
        32768,
        32769,
        -32767,
        -32768,
        -32769,
        1234,
        -1234,
    ]
    values = torch.cat([bits + offset for offset in offsets]).view(torch.float32)
    return values[values.isfinite()]


def there_and_back(storage: MasterStorage, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weight, what is stored, and the value that the two make."""
    weight = value.to(dtype)
    stored = storage.store(weight)
    storage.write([value], [weight], [stored], [weight])
    return weight, stored, storage.read([weight], [stored])[0].clone()


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Returns whether the numbers are the same, zeros with their signs."""
    bits = torch.int16 if found.dtype in HALF_DTYPES else torch.int32
    return torch.equal(found.view(bits), expected.view(bits))


def equal_or_both_nan(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def distance(weight: Tensor, value: Tensor) -> Tensor:
    return (weight.double() - value.double()).abs()


def test_a_bf16_weight_and_its_remainder_are_the_float32_value_bit_exactly() -> None:
    value = near(finite_patterns(BF16))
    weight, _, found = there_and_back(Remainder(), value, BF16)
    assert same_bits(found, value)
    in_range = weight.isfinite() & value.to(BF16).isfinite()
    assert torch.equal(distance(weight, value)[in_range], distance(value.to(BF16), value)[in_range])


def test_a_bf16_weight_differs_from_the_cast_at_ties_only() -> None:
    value = near(finite_patterns(BF16))
    weight, _, _ = there_and_back(Remainder(), value, BF16)
    tie = (value.view(torch.int32) & 0xFFFF) == 0x8000
    differs = weight != value.to(BF16)
    assert bool(differs.any())
    assert not bool((differs & ~tie).any())


def test_every_float32_value_of_some_binades_comes_back_from_bf16() -> None:
    for exponent in (1, 100, 127, 254):
        value = ((exponent << 23) + torch.arange(0, 2**23, 7, dtype=torch.int32)).view(torch.float32)
        for signed in (value, -value):
            assert same_bits(there_and_back(Remainder(), signed, BF16)[2], signed)


def test_an_fp16_weight_and_its_remainder_are_the_float32_value_within_their_range() -> None:
    value = near(finite_patterns(FP16))
    value = value[(value.abs() >= 2.0**-17) & (value.abs() < 65520)]
    weight, _, found = there_and_back(Remainder(), value, FP16)
    assert same_bits(found, value)
    assert torch.equal(distance(weight, value), distance(value.half(), value))


def test_every_float32_value_of_fp16s_border_binades_comes_back() -> None:
    for exponent in (-17, -16, -15, -14, 0, 14):
        value = (((exponent + 127) << 23) + torch.arange(0, 2**23, 3, dtype=torch.int32)).view(torch.float32)
        for signed in (value, -value):
            assert same_bits(there_and_back(Remainder(), signed, FP16)[2], signed)
    border = torch.tensor([65519.996, -65519.996])
    assert same_bits(there_and_back(Remainder(), border, FP16)[2], border)


def test_smaller_values_come_back_from_fp16_within_their_bound() -> None:
    value = torch.cat([near(finite_patterns(FP16)), torch.linspace(-(2.0**-17), 2.0**-17, 100_001)])
    value = value[value.abs() < 2.0**-17]
    _, _, found = there_and_back(Remainder(), value, FP16)
    assert distance(found, value).max() <= 2.0**-41


@pytest.mark.parametrize("storage", [Remainder(), Kahan()], ids=["remainder", "kahan"])
def test_values_beyond_fp16_are_inf_and_nothing_becomes_nan(storage: MasterStorage) -> None:
    value = torch.tensor([65520.0, 7e4, -1e30, torch.inf, -torch.inf])
    _, _, found = there_and_back(storage, value, FP16)
    assert torch.equal(found, torch.inf * value.sign())


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", STORAGES)
def test_all_65536_weights_stay_as_they_are(name: Storage, dtype: torch.dtype) -> None:
    storage, weight = make_storage(name), all_patterns(dtype)
    stored = storage.store(weight)
    before = weight.clone()
    value = storage.read([weight], [stored])[0]
    expected = before.float()
    assert equal_or_both_nan(value, expected)
    storage.write([value], [weight], [stored], [weight])
    numbers = ~before.isnan()
    assert same_bits(weight[numbers], before[numbers])
    assert bool(weight[~numbers].isnan().all())


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", STORAGES)
def test_values_written_back_as_they_were_read_change_nothing(name: Storage, dtype: torch.dtype) -> None:
    storage, value = make_storage(name), near(finite_patterns(dtype))
    value = value[value.abs() <= torch.finfo(dtype).max]
    weight, stored, found = there_and_back(storage, value, dtype)
    if name == "fp32":
        stored.data.copy_(value)
    before, stored_before = weight.clone(), stored.detach().clone()
    with torch.no_grad():
        storage.write([found], [weight], [stored], [weight])
    assert same_bits(weight, before)
    assert torch.equal(stored, stored_before)


@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 16), (FP16, 22)])
def test_kahan_keeps_twice_the_bits_of_a_weight(dtype: torch.dtype, bits: int) -> None:
    value = near(finite_patterns(dtype))
    smallest = 2.0**-100 if dtype is BF16 else 2.0**-2  # below, FP16's smallest number bounds what is stored
    value = value[(value.abs() >= smallest) & (value.abs() < 0.9 * torch.finfo(dtype).max)]
    weight, _, found = there_and_back(Kahan(), value, dtype)
    assert torch.equal(weight, value.to(dtype))
    assert (distance(found, value) / value.double().abs()).max() <= 2.0**-bits


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(dtype: torch.dtype) -> None:
    weights = finite_patterns(dtype)
    bits = weights.float().view(torch.int32)
    value = (bits + 1234).view(torch.float32)
    value = value[value.abs() <= torch.finfo(dtype).max]
    rounded, _, _ = there_and_back(Stochastic(0), value, dtype)
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    unit = (value.double().abs() * torch.finfo(dtype).eps).clamp(min=smallest)
    assert bool((distance(rounded, value) < unit).all())


@pytest.mark.parametrize(("dtype", "value"), [(BF16, 1.001), (FP16, -1.0001), (FP16, 3.3 * 2.0**-24), (BF16, 1e-40)])
def test_stochastic_rounding_is_right_on_average(dtype: torch.dtype, value: float) -> None:
    count = 400_000
    values = torch.full((count,), value)
    rounded, _, _ = there_and_back(Stochastic(1), values, dtype)
    choices = rounded.double().unique()
    assert choices.numel() == 2
    standard_error = float(choices[1] - choices[0]) / 2 / count**0.5
    assert abs(float(rounded.double().mean()) - values[0].double().item()) < 5 * standard_error


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_stochastic_rounding_beyond_the_largest_number_is_to_nearest(dtype: torch.dtype) -> None:
    largest = torch.tensor(torch.finfo(dtype).max)
    below_half_a_unit = torch.full((1_000,), 4_000, dtype=torch.int32)
    beyond = (largest.view(torch.int32) + below_half_a_unit).view(torch.float32)
    value = torch.cat([beyond, -beyond, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    rounded, _, _ = there_and_back(Stochastic(0), value, dtype)
    assert equal_or_both_nan(rounded, value.to(dtype))


def test_a_saved_value_is_taken_only_where_the_weight_is_a_nearest_one() -> None:
    value = torch.tensor([1.001, 1.001, 1.00390625, 1.00390625])  # the last two lie midway between 1 and 1.0078125
    weight = torch.tensor([1.0, 2.0, 1.0, 1.0078125], dtype=BF16)
    assert refined(weight, value).tolist() == [value[0].item(), 2.0, 1.00390625, 1.00390625]


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("grad_fp32", [False, True])
def test_the_bytes_reported_are_those_of_the_tensors(name: Storage, grad_fp32: bool) -> None:
    weight = torch.zeros(100, dtype=FP16)
    stored = make_storage(name).store(weight)
    tensors = weight.nbytes + stored.nbytes + 100 * (4 if grad_fp32 else 2)
    assert bytes_per_parameter(name, grad_fp32=grad_fp32) == tensors / 100


def test_values_have_the_memory_layout_of_the_weights() -> None:
    plain, channels_last = torch.zeros(3, 5), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given = [each.half() for each in (plain, channels_last, torch.zeros(()), torch.zeros(0, 2))]
    storage = make_storage("kahan")
    made = storage.read(given, [storage.store(each) for each in given])
    assert [tensor.stride() for tensor in made] == [tensor.stride() for tensor in given]
