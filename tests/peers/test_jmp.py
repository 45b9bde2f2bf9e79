"""jmp's loss scales."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import assert_goes_on, scales, walked

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling, Static

FLAGS = st.lists(st.booleans(), max_size=40)


def test_floor_is_lost_under_jit() -> None:
    config = {"loss_scale": 256.0, "min_loss_scale": 64.0}
    assert scales(preset("jmp", "DynamicLossScale", **config), [True] * 4) == [128.0, 64.0, 64.0, 64.0]
    assert scales(preset("jmp", "DynamicLossScale (jit)", **config), [True] * 4) == [128.0, 64.0, 32.0, 16.0]


def test_qualified_name_without_a_note_means_the_rule_outside_jit() -> None:
    assert preset("jmp", "jmp.DynamicLossScale", loss_scale=8.0) == preset("jmp", "DynamicLossScale", loss_scale=8.0)


@given(st.integers(0, 20), st.integers(1, 6), FLAGS)
def test_counter_given_at_the_start_wraps_as_the_remainder_does(counter: int, period: int, flags: list[bool]) -> None:
    policy = preset("jmp", loss_scale=1024.0, counter=counter, period=period)
    scale, seen = 1024.0, []
    for overflow in flags:
        grows = not overflow and counter == period - 1
        scale = max(scale / 2, 1.0) if overflow else scale * 2 if grows else scale
        counter = 0 if overflow else (counter + 1) % period
        seen.append(scale)
    assert scales(policy, flags) == seen


@given(FLAGS, FLAGS, st.integers(1, 5), st.sampled_from([2, 3, 1.7]), st.sampled_from([0.0, 0.5, 64.0]))
def test_exported_state_goes_on_as_before(
    before: list[bool], after: list[bool], period: int, factor: float, floor: float
) -> None:
    policy = preset("jmp", loss_scale=100.0, period=period, factor=factor, min_loss_scale=floor)
    assert_goes_on("jmp", policy, walked(policy, before), after)


@given(st.integers(0, 20), st.integers(1, 6), FLAGS)
def test_state_exported_before_the_first_step_goes_on_as_before(counter: int, period: int, after: list[bool]) -> None:
    policy = preset("jmp", loss_scale=100.0, counter=counter, period=period)
    assert_goes_on("jmp", policy, policy.start(), after)


def test_static_and_no_op_scales_come_back_as_what_they_are() -> None:
    static = preset("jmp", "StaticLossScale", loss_scale=64.0)
    assert import_state("jmp", export_state("jmp", static, static.start()))[0] == static == Static(64.0)
    no_op = preset("jmp", "NoOpLossScale")
    assert import_state("jmp", export_state("jmp", no_op, no_op.start()))[0] == no_op == NoScaling()


def test_dynamic_is_exported_with_its_floor() -> None:
    policy = Dynamic(init_scale=64.0, growth_interval=5, min_scale=4.0)
    exported = export_state("jmp", policy, policy.start())
    assert exported == {"loss_scale": 64.0, "counter": 0, "period": 5, "factor": 2.0, "min_loss_scale": 4.0}
    assert exported["loss_scale"].dtype == np.float32
    assert exported["counter"].dtype == np.int32


def test_export_refuses_hysteresis() -> None:
    policy = Dynamic(hysteresis=2)
    with pytest.raises(ValueError, match="jmp's DynamicLossScale has hysteresis=1 and no setting for it"):
        export_state("jmp", policy, policy.start())


def test_scale_at_zero_is_imported_as_it_is() -> None:
    policy, state = import_state("jmp", {"loss_scale": 0.0, "counter": 1})
    assert scales(policy, [False, True]) == [0.0, 1.0]
    assert float(state.scale) == 0.0


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        ({"counter": 2}, ValueError, r"missing: \['loss_scale'\]"),
        ({"loss_scale": 2.0, "counter": -2}, ValueError, "`counter` .* between 0 and"),
        ({"loss_scale": math.nan, "counter": 2}, ValueError, "must not be NaN"),
        ({"loss_scale": 2.0, "counter": 1, "interval": 3}, ValueError, r"unknown: \['interval'\]"),
        ({"loss_scale": 2.0, "counter": 1, "factor": 0.0}, ValueError, "`factor` must be positive"),
        ({"loss_scale": 2.0, "counter": True}, TypeError, "`counter` .* must be an integer"),
    ],
)
def test_import_refuses_what_jmp_does_not_hold(saved: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_state("jmp", saved)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({}, TypeError, r"`preset\('jmp'\)` takes"),
        ({"loss_scale": -1.0}, ValueError, "`loss_scale` must be positive"),
        ({"loss_scale": 1.0, "period": 0}, ValueError, "`period` must be between 1"),
        ({"loss_scale": 1.0, "counter": -1}, ValueError, "`counter` must be between 1"),
        ({"loss_scale": 1.0, "min_loss_scale": math.nan}, ValueError, "`min_loss_scale` must not be negative or NaN"),
    ],
)
def test_preset_refuses_settings_that_cannot_work(config: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        preset("jmp", **config)
