"""flax's `DynamicScale`."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import assert_goes_on, scales, walked

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import Static

FLAGS = st.lists(st.booleans(), max_size=40)
LARGEST, TINY = float(np.finfo(np.float32).max), 2.0**-126


def test_growth_takes_one_clean_step_more_than_the_interval() -> None:
    assert scales(preset("flax", scale=8.0, growth_interval=2), [False] * 6) == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0]


def test_interval_of_zero_grows_with_each_step() -> None:
    assert scales(preset("flax", scale=8.0, growth_interval=0), [False] * 2) == [16.0, 32.0]


def test_scale_stops_at_the_largest_float32_and_comes_back_from_it() -> None:
    policy = preset("flax", scale=2.0**127, growth_interval=0)
    assert scales(policy, [False, False, True]) == [LARGEST, LARGEST, LARGEST / 2]


def test_scale_stops_at_the_smallest_normal_number_by_default() -> None:
    assert scales(preset("flax", scale=2.0**-125), [True] * 3) == [2.0**-126] * 3


@pytest.mark.parametrize("lowest", [None, 0.0, 1e-44])
def test_scale_without_a_minimum_falls_to_zero(lowest: float | None) -> None:
    assert scales(preset("flax", scale=2.0**-125, minimum_scale=lowest), [True] * 3) == [2.0**-126, 0.0, 0.0]


def test_counter_past_the_interval_does_not_grow_until_an_overflow() -> None:
    policy = preset("flax", scale=8.0, growth_interval=1, fin_steps=5)
    assert scales(policy, [False] * 4 + [True] + [False] * 2) == [8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 8.0]


@given(FLAGS, FLAGS, st.integers(0, 4), st.sampled_from([2.0, 3.0]), st.sampled_from([0.5, 0.3]))
def test_exported_state_goes_on_as_before(
    before: list[bool], after: list[bool], interval: int, growth: float, backoff: float
) -> None:
    settings = {"growth_interval": interval, "growth_factor": growth, "backoff_factor": backoff, "minimum_scale": 5.0}
    policy = preset("flax", scale=100.0, **settings)
    assert_goes_on("flax", policy, walked(policy, before), after, **settings)


def test_export_has_the_keys_that_flax_restores_and_no_others() -> None:
    policy = preset("flax", growth_interval=10)
    assert export_state("flax", policy, walked(policy, [False] * 3)) == {"fin_steps": 3, "scale": 65536.0}


def test_dynamic_goes_on_in_flax_as_before() -> None:
    policy = Dynamic(growth_interval=3)
    assert_goes_on("flax", policy, walked(policy, [True, False]), [False] * 8 + [True], growth_interval=2)


def test_export_refuses_hysteresis_and_static_scales() -> None:
    policy = Dynamic(hysteresis=2)
    with pytest.raises(ValueError, match="flax's DynamicScale has hysteresis=1 and no setting for it"):
        export_state("flax", policy, policy.start())
    with pytest.raises(TypeError, match="Received: Static"):
        export_state("flax", Static(8.0), Static(8.0).start())


def test_scale_at_zero_is_imported_as_it_is() -> None:
    policy, state = import_state("flax", {"scale": 0.0, "fin_steps": 1})
    assert scales(policy, [False, True]) == [0.0, TINY]
    assert float(state.scale) == 0.0


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        ({"scale": 2.0}, ValueError, r"missing: \['fin_steps'\]"),
        ({"scale": 2.0, "fin_steps": -1}, ValueError, "`fin_steps` .* between 0 and"),
        ({"scale": math.nan, "fin_steps": 0}, ValueError, "must not be NaN"),
        ({"scale": -2.0, "fin_steps": 0}, ValueError, "`scale` .* must not be negative"),
        ({"scale": 2.0, "fin_steps": 0, "bogus": 1}, ValueError, r"unknown: \['bogus'\]"),
        ({"scale": None, "fin_steps": 0}, TypeError, "`scale` .* must be a number"),
    ],
)
def test_import_refuses_what_flax_does_not_save(saved: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_state("flax", saved)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"growth_factor": 0.0}, "`growth_factor` must be positive"),
        ({"backoff_factor": math.nan}, "`backoff_factor` must be positive"),
        ({"growth_interval": -1}, "`growth_interval` must be between"),
        ({"minimum_scale": -1.0}, "`minimum_scale` must not be negative"),
    ],
)
def test_preset_refuses_settings_that_cannot_work(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        preset("flax", **config)
