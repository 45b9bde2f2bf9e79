"""A scaler as text."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradscale
from gradscale import FP8_E5M2, Dynamic, Headroom, LogMax, NoScaling, Static, preset
from gradscale._text import scaler_text
from gradscale.engine.result import StepResult
from gradscale.peers.ladder import Ladder
from gradscale.record import place, settings_text
from gradscale.replay.stack import stacked


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (Headroom(), "Headroom()"),
        (Headroom(FP8_E5M2, leak=0.1), "Headroom(format=FP8_E5M2, leak=0.1)"),
        (Dynamic(init_scale=8.0, refill="clean"), "Dynamic(init_scale=8.0, refill='clean')"),
        (Static(8.0), "Static(scale=8.0)"),
        (NoScaling(), "NoScaling()"),
        (preset("torch"), "Ladder(init_scale=65536.0, refuses_inf=True)"),
        (preset("megatron"), "Ladder(init_scale=2**32, growth_interval=1000, hysteresis=2, fewest_credits="),
        (Dynamic(min_scale=2.0**-24, max_scale=2.0**24), "Dynamic(min_scale=2**-24, max_scale=2**24)"),
        (Headroom(leak=0.003), "Headroom(leak=0.003)"),
    ],
)
def test_a_policy_is_shown_with_what_is_not_its_default(policy: Any, text: str) -> None:
    assert settings_text(policy).startswith(text)
    assert repr(policy) == settings_text(policy)


def test_a_policy_of_another_kind_is_shown_as_it_is() -> None:
    assert settings_text("mine") == "'mine'"


def test_a_scaler_is_shown_with_its_scale_its_counts_and_the_last_status() -> None:
    state = SimpleNamespace(scale=8.0, applied=3, skipped=1)
    last = StepResult(applied=False, scale=16.0, next_scale=8.0)
    shown = scaler_text("LossScaler", ["Dynamic()"], state, last, lambda number: number)
    assert shown == "LossScaler(Dynamic(), scale=8.0, applied=3, skipped=1, last=overflow)"
    assert scaler_text("S", [], state, None, lambda _: "<on x>") == "S(scale=<on x>, applied=<on x>, skipped=<on x>)"


@pytest.mark.parametrize("policy", [Dynamic(2.0**-3, 1.1, min_scale=2.0**-24), LogMax(beta1=0.9), Headroom("bf16")])
def test_what_is_shown_makes_the_same_policy(policy: Any) -> None:
    assert eval(repr(policy), dict(vars(gradscale))) == policy


def test_settings_that_are_arrays_are_shown_and_not_compared() -> None:
    many = stacked([Dynamic(init_scale=8.0), Dynamic(init_scale=16.0)])
    assert "init_scale=" in repr(many)
    assert repr(place(Ladder(8.0), np.asarray)).startswith("Ladder(init_scale=array(")


def test_a_scale_is_shown_as_a_power_of_two_where_it_is_long() -> None:
    state = SimpleNamespace(scale=2.0**-126, applied=3, skipped=1)
    assert scaler_text("S", [], state, None, lambda number: number) == "S(scale=2**-126, applied=3, skipped=1)"
    result = StepResult(applied=True, scale=2.0**-24, next_scale=0.5)
    assert repr(result) == "StepResult(status=applied, scale=2**-24, next_scale=0.5)"
