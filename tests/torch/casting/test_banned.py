"""Each banned function goes wrong in half precision, its replacement does not, and `casts` says so."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.casting import library
from tests.torch.helpers import autocast
from torch import Tensor, nn
from torch.nn import functional

from gradscale.torch import casts
from gradscale.torch.casting import BANNED, bans

FP16, BF16 = torch.float16, torch.bfloat16

Error = Callable[[torch.dtype], float]


def off(found: Tensor, expected: float) -> float:
    """Returns how far a result is from what it should be, relatively; inf where it is not finite."""
    error = abs(float(found) - expected) / max(abs(expected), 1e-3)
    return error if math.isfinite(error) else math.inf


def entropy(dtype: torch.dtype) -> float:
    return off(
        functional.binary_cross_entropy(torch.tensor(9.0, dtype=dtype).sigmoid(), torch.zeros((), dtype=dtype)), 9
    )


def entropy_with_logits(dtype: torch.dtype) -> float:
    target = torch.zeros((), dtype=dtype)
    return off(functional.binary_cross_entropy_with_logits(torch.tensor(9.0, dtype=dtype), target), 9)


def there_and_back(there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], start: float) -> Error:
    return lambda dtype: off(back(there(torch.tensor(start, dtype=dtype))), start)


def kept(start: float) -> Error:
    return lambda dtype: off(torch.tensor(start, dtype=dtype), start)


def angle(dtype: torch.dtype) -> float:
    value = torch.tensor(0.01, dtype=dtype)
    return off(torch.atan2(value.sin(), value.cos()), 0.01)


def zeros(function: Callable[[Tensor], Tensor]) -> Error:
    return lambda dtype: off(function(torch.zeros(1, 4, dtype=dtype)).sum(), 0)


CASES: dict[Any, tuple[Error, Error]] = {
    functional.binary_cross_entropy: (entropy, entropy_with_logits),
    torch.logit: (there_and_back(torch.sigmoid, torch.logit, 9), kept(9)),
    torch.atanh: (there_and_back(torch.tanh, torch.atanh, 5), kept(5)),
    torch.arctanh: (there_and_back(torch.tanh, torch.arctanh, 5), kept(5)),
    torch.erfinv: (there_and_back(torch.erf, torch.erfinv, 3), kept(3)),
    torch.acos: (there_and_back(torch.cos, torch.acos, 0.01), angle),
    torch.arccos: (there_and_back(torch.cos, torch.arccos, 0.01), angle),
    functional.normalize: (zeros(functional.normalize), zeros(lambda x: functional.normalize(x.float()))),
    functional.cosine_similarity: (
        zeros(lambda x: functional.cosine_similarity(x, x)),
        zeros(lambda x: functional.cosine_similarity(x.float(), x.float())),
    ),
}

HALVES = [(function, dtype) for function in BANNED for dtype in BANNED[function].dtypes]


@pytest.mark.parametrize("auto", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(("function", "dtype"), HALVES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_banned_function_is_wrong_in_half_and_its_replacement_right(
    function: Any, dtype: torch.dtype, auto: bool
) -> None:
    banned, replacement = CASES[function]
    with autocast(dtype=dtype, enabled=auto):
        assert banned(dtype) >= 1.0
        assert replacement(dtype) < 0.01
    assert banned(torch.float64) < 0.01


@pytest.mark.parametrize(("function", "dtype"), HALVES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_casts_refuses_a_banned_function_in_half(function: Any, dtype: torch.dtype) -> None:
    with casts(), pytest.raises(RuntimeError, match=r"is unsafe in half precision\. Received: a tensor of torch"):
        CASES[function][0](dtype)


@pytest.mark.parametrize("function", BANNED, ids=lambda function: function.__name__)
def test_casts_lets_the_function_run_in_float32_and_when_allowed(function: Any) -> None:
    with casts():
        CASES[function][0](torch.float32)
    with casts(allow=[function]):
        CASES[function][0](FP16)


def test_the_error_names_what_to_use() -> None:
    probability = torch.full((2,), 0.5, dtype=FP16)
    with (
        casts(),
        pytest.raises(RuntimeError, match=r"`binary_cross_entropy` is unsafe.*Use `binary_cross_entropy_with_"),
    ):
        nn.BCELoss()(probability, probability)


def test_in_place_variants_and_other_names_are_banned_too() -> None:
    value = torch.full((2,), 0.5, dtype=FP16)
    for call in (Tensor.logit, Tensor.logit_, torch.logit_, torch.special.logit, torch.acos_, Tensor.arccos_):
        with casts(), pytest.raises(RuntimeError, match="is unsafe in half precision"):
            call(value)
    assert Tensor.logit_ in bans()


def test_a_banned_function_may_run_in_float32_if_listed_there() -> None:
    with casts(float=[functional.normalize]):
        assert functional.normalize(torch.zeros(1, 4, dtype=FP16)).tolist() == [[0.0] * 4]


def test_a_banned_function_listed_under_half_is_refused_unless_it_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"`half` must not list functions that are unsafe.*`logit`.*Keep the logits"):
        casts(half=[torch.logit])
    with casts(half=[torch.logit], allow=[torch.logit]):
        assert torch.logit(torch.full((2,), 0.5)).dtype == FP16


def test_users_ban_functions_of_their_own_with_the_reason() -> None:
    with casts(banned={library.product: "It sums 10,000 terms. Use `blocked_product`.", torch.var: "It squares."}):
        library.product(torch.ones(2, 2), torch.ones(2, 2))
        with pytest.raises(
            RuntimeError, match=r"`product` is unsafe.*torch.bfloat16. It sums 10,000 terms. Use `blocked"
        ):
            library.product(torch.ones(2, 2, dtype=BF16), torch.ones(2, 2))
        with pytest.raises(RuntimeError, match=r"`var` is unsafe.*It squares"):
            torch.ones(3, dtype=FP16).var()


def test_an_inner_context_lifts_the_ban_of_an_outer_one_and_keeps_its_casts() -> None:
    value = torch.full((2,), 0.5, dtype=FP16)
    with casts(banned={torch.var: "No."}, float=[torch.relu]):
        with casts(allow=[torch.var, torch.relu]):
            value.var()
            assert torch.relu(value).dtype == torch.float32
        with pytest.raises(RuntimeError, match="`var` is unsafe"):
            value.var()


def test_a_ban_does_not_hold_where_autocast_widens_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(1, 4, dtype=FP16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    ban = BANNED[functional.normalize]
    assert ban.safe_under == ("cuda",)
    here = type(ban)(ban.reason, ban.dtypes, safe_under=(zeros.device.type,))
    here(functional.normalize, (zeros,), {})
    with pytest.raises(RuntimeError, match="unsafe"):
        ban(functional.normalize, (zeros,), {})
