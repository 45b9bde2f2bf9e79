"""Chainer's `Optimizer.loss_scaling`."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import advanced, scales, walked

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.static import Static

FLAGS = st.lists(st.booleans(), max_size=60)


def test_scale_doubles_from_one_to_the_largest_fp16_number_until_the_first_overflow() -> None:
    assert scales(preset("chainer"), [False] * 17)[-3:] == [32768.0, 65504.0, 65504.0]


def test_scale_creeps_after_the_first_overflow() -> None:
    creep = 2.0 ** (1.0 / 3.0)
    assert scales(preset("chainer", interval=3), [False, False, True, False, False]) == [
        2.0,
        4.0,
        2.0,
        2.0 * creep,
        2.0 * creep * creep,
    ]


@given(FLAGS, st.sampled_from([1, 2, 2.5, 7, 1000]))
def test_preset_follows_the_rule_of_chainer(flags: list[bool], interval: float) -> None:
    scale, ever, seen = 1.0, False, []
    for overflow in flags:
        ever = ever or overflow
        factor = 0.5 if overflow else math.pow(2.0, 1.0 / interval) if ever else 2.0
        scale = max(1.0, min(65504.0, scale * factor))
        seen.append(scale)
    assert scales(preset("chainer", interval=interval), flags) == seen


def test_state_is_stuck_where_an_overflow_finds_the_scale_at_one() -> None:
    policy = preset("chainer")
    assert bool(advanced(policy, policy.start(), True).stuck)
    assert not bool(walked(policy, [False, True]).stuck)


def test_given_scale_is_static() -> None:
    assert preset("chainer", "Optimizer.loss_scaling", scale=128.0) == Static(128.0)


def test_chainer_saves_and_loads_nothing() -> None:
    policy = preset("chainer")
    with pytest.raises(ValueError, match="chainer saves no state"):
        import_state("chainer", {})
    with pytest.raises(ValueError, match="chainer loads no state"):
        export_state("chainer", policy, policy.start())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"interval": 0.5}, "`interval` must be at least 1"),
        ({"interval": -1}, "`interval` must be positive"),
        ({"scale": 0.0}, "`scale` must be positive"),
    ],
)
def test_preset_refuses_settings_that_chainer_refuses(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        preset("chainer", **config)
