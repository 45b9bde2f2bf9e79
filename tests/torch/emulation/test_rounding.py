"""Rounding of tensors: bit-exactly the rounding of `Format`; stochastic rounding keeps the mean."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradscale.formats import BF16, FORMATS, FP4_E2M1, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Format
from gradscale.kernels.torch_rounding import Rounding, UniformNumbers, round_copy, round_grads

pytestmark = pytest.mark.cpu_only("emulated formats are compared with numpy and the CPU")

Array = np.ndarray[Any, Any]
LOW_PRECISION = [known for known in FORMATS if known is not FP32]
SIGMAS = 5


def by_name(known: Format) -> str:
    return known.name


def values_of(known: Format) -> Array:
    """Returns every number of a format, inf and NaN too, in float32."""
    if known == TF32:
        return (np.arange(2**known.bits, dtype=np.uint32) << 13).view(np.float32)
    patterns = np.arange(2**known.bits, dtype=np.uint16 if known.bits == 16 else np.uint8)
    return patterns.view(np.dtype(known.dtype_name)).astype(np.float32)


def hard_cases(known: Format) -> Array:
    """Returns every number of a format, the middle between any two neighbors, and the floats beside all of them."""
    numbers = np.unique(values_of(known)[np.isfinite(values_of(known))]).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    ends = known.overflow_threshold * np.array([-1, 1])
    with np.errstate(over="ignore"):
        exact = np.concatenate([numbers, middles, ends]).astype(np.float32)
        beside = [np.nextafter(exact, np.float32(direction)) for direction in (-np.inf, np.inf)]
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)
    return np.concatenate([exact, *beside, specials])


def random_floats(count: int) -> Array:
    """Returns floats of random bits: all sizes, subnormals, inf and NaN."""
    return np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def assert_same_numbers(found: Tensor, expected: Array, given: Array) -> None:
    """Compares signs of zeros too, but not that of the zero that FP4, which has no NaN, makes of one."""
    np.testing.assert_array_equal(found.numpy(), expected)
    is_number = ~np.isnan(expected) & ~np.isnan(given)
    np.testing.assert_array_equal(np.signbit(found.numpy())[is_number], np.signbit(expected)[is_number])


@pytest.mark.parametrize("known", FORMATS, ids=by_name)
def test_rounding_to_nearest_is_that_of_the_format_for_every_hard_case(known: Format) -> None:
    cases = hard_cases(known) if known is not FP32 else random_floats(1000)
    assert_same_numbers(Rounding(known).round_(torch.from_numpy(cases.copy())), known.round(cases), cases)


@pytest.mark.parametrize("known", FORMATS, ids=by_name)
def test_rounding_to_nearest_is_that_of_the_format_for_random_floats(known: Format) -> None:
    cases = random_floats(300_000)
    assert_same_numbers(Rounding(known).round_(torch.from_numpy(cases.copy())), known.round(cases), cases)


@pytest.mark.parametrize("known", LOW_PRECISION, ids=by_name)
def test_saturating_makes_overflow_the_largest_number_and_leaves_the_rest(known: Format) -> None:
    cases = np.concatenate([hard_cases(known), random_floats(1000)])
    expected = known.round(np.clip(cases, np.float32(-known.max), np.float32(known.max)))
    assert_same_numbers(Rounding(known, saturate=True).round_(torch.from_numpy(cases.copy())), expected, cases)
    beyond = torch.tensor([torch.finfo().max, math.inf, -math.inf])
    assert Rounding(known, saturate=True).round_(beyond).tolist() == [known.max, known.max, -known.max]


@pytest.mark.parametrize(
    ("known", "overflow"), [(FP16, math.inf), (FP8_E5M2, math.inf), (FP8_E4M3, math.nan), (FP4_E2M1, 6.0)]
)
def test_overflow_becomes_what_the_format_has_for_it(known: Format, overflow: float) -> None:
    found = Rounding(known).round_(torch.tensor([1e6, math.inf]))
    torch.testing.assert_close(found, torch.tensor([overflow, overflow]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("known", [FP16, FP8_E4M3], ids=by_name)
def test_any_shape_and_layout_is_rounded_in_place(known: Format, stochastic: bool) -> None:
    rounding = Rounding(known, random=UniformNumbers(0) if stochastic else None)
    for choose in (
        lambda x: x,
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2],
        lambda x: x[0, 0, 0],
        lambda x: x[:0],
    ):
        whole = torch.randn(4, 6, 5)
        part = choose(whole)
        assert rounding.round_(part) is part
        assert_same_numbers(part, known.round(part.numpy()), part.numpy())
        assert part.numel() == whole.numel() or not torch.equal(torch.from_numpy(known.round(whole.numpy())), whole)


@pytest.mark.parametrize("known", LOW_PRECISION, ids=by_name)
def test_stochastic_rounding_gives_one_of_the_two_neighbours_with_the_right_chance(known: Format) -> None:
    random, count = UniformNumbers(seed=0), 20_000
    numbers = np.unique(values_of(known)[np.isfinite(values_of(known))])
    for share in (0.1, 0.5, 0.75):
        places = np.linspace(0, len(numbers) - 2, 9).astype(int)
        for below, above in zip(numbers[places], numbers[places + 1], strict=True):
            value = np.float32(below + np.float64(share) * (np.float64(above) - below))
            found = Rounding(known, random=random).round_(torch.full((count,), float(value))).numpy()
            assert set(np.unique(found)) <= {below, above}
            true_share = float((np.float64(value) - below) / (np.float64(above) - below))
            sigma = math.sqrt(true_share * (1 - true_share) / count)
            assert abs((found == above).mean() - true_share) < SIGMAS * sigma + 1e-9


@pytest.mark.parametrize("known", LOW_PRECISION, ids=by_name)
def test_stochastic_rounding_has_no_bias_over_many_values(known: Format) -> None:
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1)) * min(known.max / 8, 1.0)
    found = Rounding(known, random=UniformNumbers(seed=2)).round_(values.clone())
    power = torch.exp2(torch.floor(torch.log2(values.abs().clamp_min(known.smallest_normal).double())))
    errors = (found.double() - values) / (power * 2.0**-known.mantissa_bits)
    assert errors.abs().max() < 1 + 1e-6
    assert abs(float(errors.sum())) < SIGMAS * float((errors.square()).sum().sqrt())


@pytest.mark.parametrize("known", FORMATS, ids=by_name)
def test_stochastic_rounding_leaves_numbers_of_the_format_as_they_are(known: Format) -> None:
    numbers = values_of(known) if known is not FP32 else random_floats(1000)
    numbers = numbers[np.isfinite(numbers) | (np.isinf(numbers) & known.has_inf)]
    assert_same_numbers(
        Rounding(known, random=UniformNumbers(seed=0)).round_(torch.from_numpy(numbers.copy())), numbers, numbers
    )


def test_stochastic_rounding_keeps_nan_and_overflows_beyond_the_largest_number() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1e6, -1e6, 65535.0])
    found = Rounding(FP16, random=UniformNumbers(seed=0)).round_(values)
    assert math.isnan(found[0])
    assert found[1:5].tolist() == [math.inf, -math.inf, math.inf, -math.inf]
    assert found[5] in (65504.0, math.inf)


def test_a_seed_gives_the_same_numbers_and_leaves_torchs_random_numbers_alone() -> None:
    values, state = torch.randn(1000), torch.get_rng_state()
    one, other = (Rounding(BF16, random=UniformNumbers(seed=3)) for _ in range(2))
    first = one.round_(values.clone())
    assert torch.equal(first, other.round_(values.clone()))
    assert not torch.equal(first, other.round_(values.clone()))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_numbers_come_from_torchs_random_numbers() -> None:
    values = torch.randn(1000)
    torch.manual_seed(5)
    first = Rounding(BF16, random=UniformNumbers(seed=None)).round_(values.clone())
    torch.manual_seed(5)
    assert torch.equal(first, Rounding(BF16, random=UniformNumbers(seed=None)).round_(values.clone()))


@pytest.mark.parametrize("known", [FP16, BF16, FP8_E5M2, FP8_E4M3], ids=by_name)
@pytest.mark.parametrize("saturate", [False, True])
def test_a_copy_is_the_same_whether_or_not_autograd_records_it(known: Format, saturate: bool) -> None:
    rounding = Rounding(known, saturate)
    values = torch.from_numpy(hard_cases(known)[: 4 * 60]).view(4, 60)
    for given in (values, values.T, values[:, ::3], values[0].expand(3, -1), values[:0], values[0, 0]):
        recorded = round_copy(given.detach().requires_grad_(), rounding, rounding).detach()
        with torch.no_grad():
            plain = round_copy(given, rounding, rounding)
        assert plain.stride() == recorded.stride()
        torch.testing.assert_close(plain, recorded, rtol=0, atol=0, equal_nan=True)
        assert not torch._C._is_alias_of(plain, given)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward mode
def test_tangents_of_forward_mode_are_not_rounded() -> None:
    with forward_ad.dual_level(), torch.no_grad():
        copy = round_copy(
            forward_ad.make_dual(torch.tensor(1 / 3), torch.tensor(1 / 3)), Rounding(FP16), Rounding(FP16)
        )
        found = forward_ad.unpack_dual(copy)
        assert found.primal.item() == float(np.float16(1 / 3))
        assert found.tangent is not None
        assert found.tangent.item() == float(np.float32(1 / 3))


def test_gradients_in_float32_get_no_hook() -> None:
    kept, rounded = (torch.ones((), requires_grad=True) * 1 for _ in range(2))
    round_grads(kept, Rounding(FP32))
    round_grads(rounded, Rounding(FP16))
    assert not kept._backward_hooks
    assert rounded._backward_hooks
