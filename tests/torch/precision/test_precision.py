"""`Precision`: the levels, their names, and what cannot be meant together."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import nn

from gradscale import Dynamic, NoScaling, Static
from gradscale.torch import O0, O1, O2, O3, Precision
from gradscale.torch.precision.levels import LEVELS, as_precision


def test_the_levels_are_those_of_apex() -> None:
    fields = ("compute", "autocast", "half_weights", "keep_norm_fp32", "master_weights")
    assert [tuple(getattr(level, field) for field in fields) for level in (O0, O1, O2, O3)] == [
        (torch.float32, False, False, True, None),
        (torch.float16, True, False, True, None),
        (torch.float16, False, True, True, "fp32"),
        (torch.float16, False, True, False, None),
    ]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("O0", O0),
        ("O1", O1),
        ("O2", O2),
        ("O3", O3),
        ("O1-bf16", replace(O1, compute=torch.bfloat16)),
        ("O2-bf16", replace(O2, compute=torch.bfloat16)),
        ("O3-bf16", replace(O3, compute=torch.bfloat16)),
        ("fp32", O0),
        ("fp16", O1),
        ("bf16", replace(O1, compute=torch.bfloat16)),
    ],
)
def test_every_level_has_a_name(name: str, precision: Precision) -> None:
    assert as_precision(name) == precision


def test_all_names_are_tested_above() -> None:
    assert len(LEVELS) == 10


@pytest.mark.parametrize("name", ["O4", "o1", "", "int8", None, torch.float16])
def test_an_unknown_level_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a `Precision` or one of 'O0', 'O1'.*Received: precision="):
        as_precision(name)


def test_a_precision_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        O1.compute = torch.bfloat16  # type: ignore[misc]


def test_fp16_gets_the_automatic_policy_and_the_others_none() -> None:
    assert O1.scaling() == O2.scaling() == O3.scaling() == "auto"
    assert {LEVELS[name].scaling() for name in ("O0", "O1-bf16", "O2-bf16", "O3-bf16")} == {NoScaling()}


@pytest.mark.parametrize("level", [O0, O1, replace(O1, compute=torch.bfloat16)])
def test_a_given_policy_is_used_in_every_precision(level: Precision) -> None:
    assert replace(level, policy=Static(8.0)).scaling() == Static(8.0)


REFUSED: list[tuple[Precision, dict[str, Any], str]] = [
    (
        O1,
        {"compute": torch.float64},
        r"`compute` must be .* Received: compute=torch.float64. .*`gradscale.torch.emulate`",
    ),
    (O1, {"compute": "fp16"}, r"`compute` must be .* Received: compute='fp16'"),
    (O1, {"compute": torch.float32}, r"`compute` is float32. Received: autocast=True, half_weights=False"),
    (O2, {"compute": torch.float32}, r"`compute` is float32. Received: autocast=False, half_weights=True"),
    (
        O0,
        {"compute": torch.float16},
        r"by `autocast` or by `half_weights`. Received: compute=torch.float16 with neither",
    ),
    (O1, {"autocast": False}, r"by `autocast` or by `half_weights`"),
    (O2, {"keep_fp32": "head"}, r"must be a tuple .* Received: keep_fp32='head'. .*`keep_fp32=\('head',\)`"),
    (O1, {"policy": "fast"}, r"`policy` must be a policy, .* Received: policy='fast'"),
    (O1, {"policy": Dynamic}, r"`policy` must be a policy"),
]


@pytest.mark.parametrize(("level", "changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_meant_is_refused(level: Precision, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replace(level, **changes)


@pytest.mark.parametrize("level", LEVELS.values())
def test_modules_can_be_kept_in_float32_at_every_level(level: Precision) -> None:
    assert replace(level, keep_fp32=("head", nn.Softmax)).keep_fp32 == ("head", nn.Softmax)


def test_half_weights_can_run_under_autocast_too() -> None:
    assert replace(O2, autocast=True).half_weights
