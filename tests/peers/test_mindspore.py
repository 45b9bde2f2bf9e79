"""MindSpore's cells, scalers and managers."""

import math
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
CELL = {"scale_sense": 512.0, "current_iterator_step": 9, "last_overflow_iterator_step": 5}


def test_cell_is_stuck_at_infinity_where_the_scaler_of_amp_stops_growing() -> None:
    cell = preset("mindspore", loss_scale_value=2.0**127, scale_factor=2, scale_window=1)
    amp = preset("mindspore", "amp.DynamicLossScaler", scale_value=2.0**127, scale_factor=2, scale_window=1)
    assert scales(cell, [False, True]) == [math.inf, math.inf]
    assert bool(walked(cell, [False, True]).stuck)
    assert scales(amp, [False, True]) == [2.0**127, 2.0**126]


def test_manager_is_stuck_after_more_than_a_thousand_overflows_in_a_row_and_not_before() -> None:
    policy = preset("mindspore", "DynamicLossScaleManager")
    state = walked(policy, [True] * 500 + [False] + [True] * 1000)
    assert float(state.scale) == 1.0
    assert not bool(state.stuck)
    assert bool(advanced(policy, state, True).stuck)


@given(FLAGS, st.integers(1, 5), st.sampled_from([2, 3, 1.7]))
def test_manager_follows_its_rule_in_python_floats(flags: list[bool], window: int, factor: float) -> None:
    policy = preset(
        "mindspore", "DynamicLossScaleManager", init_loss_scale=1e4, scale_factor=factor, scale_window=window
    )
    scale, iteration, last, seen = 1e4, 1, 0, []
    for overflow in flags:
        if overflow:
            scale, last = max(scale * (1 / factor), 1), iteration
        elif (iteration - last) % window == 0:
            scale *= factor
        iteration += 1
        seen.append(scale)
    assert scales(policy, flags) == seen


@pytest.mark.parametrize(
    ("variant", "config"),
    [
        ("FixedLossScaleManager", {"loss_scale": 64.0, "drop_overflow_update": False}),
        ("nn.FixedLossScaleUpdateCell", {"loss_scale_value": 64.0}),
        ("amp.StaticLossScaler", {"scale_value": 64.0}),
    ],
)
def test_fixed_scales_are_static(variant: str, config: dict[str, Any]) -> None:
    assert preset("mindspore", variant, **config) == Static(64.0)


@given(FLAGS, FLAGS, st.integers(1, 5), st.sampled_from([2, 3]))
def test_exported_state_of_the_cell_goes_on_as_before(
    before: list[bool], after: list[bool], window: int, factor: float
) -> None:
    policy = preset("mindspore", loss_scale_value=100.0, scale_factor=factor, scale_window=window)
    assert_goes_on("mindspore", policy, walked(policy, before), after)


@given(FLAGS, FLAGS, st.integers(1, 5), st.sampled_from([2, 3]))
def test_exported_state_of_the_scaler_of_amp_goes_on_as_before(
    before: list[bool], after: list[bool], window: int, factor: float
) -> None:
    config = {"scale_value": 100.0, "scale_factor": factor, "scale_window": window}
    policy = preset("mindspore", "amp.DynamicLossScaler", **config)
    assert_goes_on("mindspore", policy, walked(policy, before), after)


def test_manager_goes_on_in_the_cell() -> None:
    policy = preset("mindspore", "DynamicLossScaleManager", scale_window=3)
    assert_goes_on("mindspore", policy, walked(policy, [False, True, False]), [False, False, True, False])


def test_steps_of_the_cell_are_counted_from_one() -> None:
    policy = preset("mindspore", loss_scale_value=100.0, scale_factor=2, scale_window=10)
    exported = export_state("mindspore", policy, walked(policy, [False, True, False, False]))
    assert exported == {
        "scale_sense": 50.0,
        "current_iterator_step": 5,
        "last_overflow_iterator_step": 2,
        "scale_factor": 2.0,
        "scale_window": 10,
    }


def test_parameters_are_found_in_a_checkpoint() -> None:
    arrays = {name: np.asarray([value]) for name, value in CELL.items()}
    saved = {"weight": np.ones((2, 2)), "global_step": np.ones(1, np.int32), "moments.weight": np.ones(2), **arrays}
    policy, state = import_state("mindspore", saved)
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 3)
    assert float(advanced(policy, state, True).scale) == 256.0


def test_scale_at_infinity_is_imported_as_it_is() -> None:
    policy, state = import_state("mindspore", CELL | {"scale_sense": math.inf})
    assert bool(advanced(policy, state, True).stuck)


def test_counter_past_the_window_grows_the_scale_in_the_cell() -> None:
    policy, state = import_state("mindspore", CELL | {"scale_window": 2})
    assert float(advanced(policy, state, False).scale) == 1024.0


def test_counter_past_the_window_wraps_round_in_the_scaler_of_amp() -> None:
    policy, state = import_state("mindspore", {"scale_value": 512.0, "counter": 5, "scale_window": 2})
    assert export_state("mindspore", policy, state)["counter"] % 2 == 1
    first = advanced(policy, state, False)
    assert (float(first.scale), int(first.clean_steps)) == (512.0, 0)
    assert float(advanced(policy, advanced(policy, first, False), False).scale) == 1024.0


@pytest.mark.parametrize("saved", [{"scale_sense": 64.0}, {"scale_value": np.float32(64.0)}])
def test_scale_without_counters_is_static(saved: dict[str, Any]) -> None:
    assert import_state("mindspore", saved)[0] == Static(64.0)


def test_static_scale_is_exported_as_the_parameter_of_the_fixed_cell() -> None:
    assert export_state("mindspore", Static(64.0), Static(64.0).start()) == {"scale_sense": 64.0}


def test_dynamic_goes_on_in_mindspore_as_before() -> None:
    policy = Dynamic(growth_interval=3)
    assert_goes_on("mindspore", policy, walked(policy, [True, False]), [False] * 8 + [True])


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        ({"scale_sense": 2.0, "current_iterator_step": 1}, ValueError, r"missing: \['last_overflow_iterator_step'\]"),
        (CELL | {"last_overflow_iterator_step": 9}, ValueError, "must come before `current_iterator_step`"),
        (CELL | {"current_iterator_step": 0}, ValueError, "`current_iterator_step` .* between 1 and"),
        (CELL | {"scale_sense": math.nan}, ValueError, "must not be NaN"),
        (CELL | {"scale_windows": 3}, ValueError, r"unknown: \['scale_windows'\]"),
        ({"counter": 1}, ValueError, r"missing: \['scale_value'\]"),
        ({"scale_value": 2.0, "counter": "1"}, TypeError, "`counter` .* must be an integer"),
    ],
)
def test_import_refuses_what_mindspore_does_not_save(saved: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_state("mindspore", saved)


def test_export_refuses_two_different_factors() -> None:
    policy = Dynamic(growth_factor=4.0)
    with pytest.raises(ValueError, match="MindSpore grows and backs off by one factor"):
        export_state("mindspore", policy, policy.start())


def test_manager_refuses_a_scale_below_one() -> None:
    with pytest.raises(ValueError, match="`init_loss_scale` must be at least 1"):
        preset("mindspore", "DynamicLossScaleManager", init_loss_scale=0.5)
