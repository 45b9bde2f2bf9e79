"""A scaler as text."""

from types import SimpleNamespace
from typing import Any

import pytest

from gradscale import FP8_E5M2, Dynamic, Headroom, NoScaling, Static, preset
from gradscale.engine.result import StepResult
from gradscale.engine.texts import policy_text, scaler_text


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (Headroom(), "Headroom()"),
        (Headroom(FP8_E5M2, leak=0.5), "Headroom(format=FP8_E5M2, leak=0.5)"),
        (Dynamic(init_scale=8.0, refill="clean"), "Dynamic(init_scale=8.0, refill='clean')"),
        (Static(8.0), "Static(scale=8.0)"),
        (NoScaling(), "NoScaling()"),
        (preset("torch"), "Ladder("),
    ],
)
def test_a_policy_is_shown_with_what_is_not_its_default(policy: Any, text: str) -> None:
    assert policy_text(policy).startswith(text)


def test_a_policy_of_another_kind_is_shown_as_it_is() -> None:
    assert policy_text("mine") == "'mine'"


def test_a_scaler_is_shown_with_its_scale_its_counts_and_the_last_status() -> None:
    state = SimpleNamespace(scale=8.0, applied=3, skipped=1)
    last = StepResult(applied=False, scale=16.0, next_scale=8.0)
    shown = scaler_text("LossScaler", ["Dynamic()"], state, last, lambda number: number)
    assert shown == "LossScaler(Dynamic(), scale=8.0, applied=3, skipped=1, last=overflow)"
    assert scaler_text("S", [], state, None, lambda _: "<on x>") == "S(scale=<on x>, applied=<on x>, skipped=<on x>)"
