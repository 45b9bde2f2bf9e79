"""Keras 3's `LossScaleOptimizer`."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import advanced, assert_goes_on, scales, walked

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import Static

FLAGS = st.lists(st.booleans(), max_size=40)


def test_scale_that_reached_infinity_stays_there() -> None:
    policy = preset("keras", initial_scale=2.0**126, dynamic_growth_steps=1)
    assert scales(policy, [False] * 3 + [True] * 2) == [2.0**127, math.inf, math.inf, math.inf, math.inf]


def test_scale_below_the_normal_numbers_is_zero_and_stays_there() -> None:
    policy = preset("keras", initial_scale=2.0**-125, dynamic_growth_steps=1)
    assert scales(policy, [True, True, False, True]) == [2.0**-126, 0.0, 0.0, 0.0]
    assert bool(walked(policy, [True] * 3).stuck)


@given(FLAGS, FLAGS, st.integers(1, 5))
def test_exported_state_goes_on_as_before(before: list[bool], after: list[bool], steps: int) -> None:
    policy = preset("keras", initial_scale=100.0, dynamic_growth_steps=steps)
    assert_goes_on("keras", policy, walked(policy, before), after)


def test_variables_saved_by_index_are_found() -> None:
    saved = {"0": 7, "1": 0.0, "2": np.int32(5), "3": np.asarray(512.0, np.float32), "4": np.ones((2, 2))}
    policy, state = import_state("keras", saved)
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 5)
    assert policy == preset("keras")


def test_variables_are_found_in_a_weights_file() -> None:
    saved = {"layers": {}, "optimizer": {"vars": {"0": 7, "1": 0.0, "2": 5, "3": 512.0}}, "vars": {}}
    assert float(import_state("keras", saved)[1].scale) == 512.0


def test_variables_are_found_by_path_among_those_of_the_inner_optimizer() -> None:
    saved = {"opt/step_counter": 5, "opt/dynamic_scale": 512.0, "adam/iteration": 9, "adam/momentum": np.ones(3)}
    policy, state = import_state("keras", saved)
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 5)
    assert float(advanced(policy, state, True).scale) == 256.0


def test_import_of_infinity_is_stuck_at_the_next_overflow() -> None:
    policy, state = import_state("keras", {"step_counter": 0, "dynamic_scale": math.inf})
    assert bool(advanced(policy, state, True).stuck)


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        ({"step_counter": 1}, ValueError, r"missing: \['dynamic_scale'\]"),
        ({"step_counter": 1, "dynamic_scale": 2.0, "bogus": 1}, ValueError, r"unknown: \['bogus'\]"),
        ({"step_counter": 1, "dynamic_scale": math.nan}, ValueError, "`dynamic_scale` .* must not be NaN"),
        ({"step_counter": -1, "dynamic_scale": 2.0}, ValueError, "`step_counter` .* between 0 and"),
        ({"step_counter": 1.5, "dynamic_scale": 2.0}, TypeError, "`step_counter` .* must be an integer"),
        ({"step_counter": 1, "dynamic_scale": "2"}, TypeError, "`dynamic_scale` .* must be a number"),
        ({"step_counter": 1, "dynamic_scale": np.ones(2)}, TypeError, "`dynamic_scale` .* must be a number"),
        ({"a/step_counter": 1, "b/step_counter": 1, "dynamic_scale": 2.0}, ValueError, "saves one `step_counter`"),
    ],
)
def test_import_refuses_what_keras_does_not_save(saved: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_state("keras", saved)


def test_dynamic_is_exported_with_its_counters_and_settings() -> None:
    policy = Dynamic(init_scale=1024.0, growth_interval=7)
    assert export_state("keras", policy, replace(policy.start(), clean_steps=np.int32(3))) == {
        "step_counter": 3,
        "dynamic_scale": 1024.0,
        "initial_scale": 1024.0,
        "dynamic_growth_steps": 7,
    }


@pytest.mark.parametrize(
    "policy", [Dynamic(growth_factor=4.0), Dynamic(hysteresis=2), Dynamic(max_scale=2.0**20), Dynamic(min_scale=2.0)]
)
def test_export_refuses_a_rule_that_keras_has_no_setting_for(policy: Dynamic) -> None:
    with pytest.raises(ValueError, match=r"Keras's LossScaleOptimizer has .* and no setting for it"):
        export_state("keras", policy, policy.start())


def test_export_refuses_a_static_scale() -> None:
    with pytest.raises(TypeError, match="Received: Static"):
        export_state("keras", Static(8.0), Static(8.0).start())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"initial_scale": 0.0}, "`initial_scale` must be positive"),
        ({"dynamic_growth_steps": 0}, "`dynamic_growth_steps` must be between 1"),
    ],
)
def test_preset_refuses_settings_that_cannot_work(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        preset("keras", **config)
