"""The rules of flax, jmp, Keras and tf-keras, and their states."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import FLAGS, advanced, assert_goes_on, scales, walked

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling, Static

LARGEST, TINY = float(np.finfo(np.float32).max), 2.0**-126
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.mark.parametrize(
    ("system", "saved", "after"),
    [
        ("flax", {"scale": 0.0, "fin_steps": 1}, [0.0, TINY]),
        ("jmp", {"loss_scale": 0.0, "counter": 1}, [0.0, 1.0]),
    ],
)
def test_scale_at_zero_is_imported_as_it_is(system: str, saved: dict[str, Any], after: list[float]) -> None:
    policy, state = import_state(system, saved)
    assert scales(policy, [False, True]) == after
    assert float(state.scale) == 0.0


def test_flax_growth_takes_one_clean_step_more_than_the_interval() -> None:
    assert scales(preset("flax", scale=8.0, growth_interval=2), [False] * 6) == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0]


def test_flax_interval_of_zero_grows_with_each_step() -> None:
    assert scales(preset("flax", scale=8.0, growth_interval=0), [False] * 2) == [16.0, 32.0]


def test_flax_scale_stops_at_the_largest_float32_and_comes_back_from_it() -> None:
    policy = preset("flax", scale=2.0**127, growth_interval=0)
    assert scales(policy, [False, False, True]) == [LARGEST, LARGEST, LARGEST / 2]


def test_flax_scale_stops_at_the_smallest_normal_number_by_default() -> None:
    assert scales(preset("flax", scale=2.0**-125), [True] * 3) == [2.0**-126] * 3


@pytest.mark.parametrize("lowest", [None, 0.0, 1e-44])
def test_flax_scale_without_a_minimum_falls_to_zero(lowest: float | None) -> None:
    assert scales(preset("flax", scale=2.0**-125, minimum_scale=lowest), [True] * 3) == [2.0**-126, 0.0, 0.0]


def test_flax_counter_past_the_interval_does_not_grow_until_an_overflow() -> None:
    policy = preset("flax", scale=8.0, growth_interval=1, fin_steps=5)
    assert scales(policy, [False] * 4 + [True] + [False] * 2) == [8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 8.0]


def test_export_has_the_keys_that_flax_restores_and_no_others() -> None:
    policy = preset("flax", growth_interval=10)
    assert export_state("flax", policy, walked(policy, [False] * 3)) == {"fin_steps": 3, "scale": 65536.0}


def test_jmp_floor_is_lost_under_jit() -> None:
    config = {"loss_scale": 256.0, "min_loss_scale": 64.0}
    assert scales(preset("jmp", "DynamicLossScale", **config), [True] * 4) == [128.0, 64.0, 64.0, 64.0]
    assert scales(preset("jmp", "DynamicLossScale (jit)", **config), [True] * 4) == [128.0, 64.0, 32.0, 16.0]


def test_jmp_qualified_name_without_a_note_means_the_rule_outside_jit() -> None:
    assert preset("jmp", "jmp.DynamicLossScale", loss_scale=8.0) == preset("jmp", "DynamicLossScale", loss_scale=8.0)


@given(st.integers(0, 20), st.integers(1, 6), FLAGS)
def test_jmp_counter_given_at_the_start_wraps_as_the_remainder_does(
    counter: int, period: int, flags: list[bool]
) -> None:
    policy = preset("jmp", loss_scale=1024.0, counter=counter, period=period)
    scale, seen = 1024.0, []
    for overflow in flags:
        grows = not overflow and counter == period - 1
        scale = max(scale / 2, 1.0) if overflow else scale * 2 if grows else scale
        counter = 0 if overflow else (counter + 1) % period
        seen.append(scale)
    assert scales(policy, flags) == seen


@given(st.integers(0, 20), st.integers(1, 6), FLAGS)
def test_jmp_state_exported_before_the_first_step_goes_on_as_before(
    counter: int, period: int, after: list[bool]
) -> None:
    policy = preset("jmp", loss_scale=100.0, counter=counter, period=period)
    assert_goes_on("jmp", policy, policy.start(), after)


def test_jmp_static_and_no_op_scales_come_back_as_what_they_are() -> None:
    static = preset("jmp", "StaticLossScale", loss_scale=64.0)
    assert import_state("jmp", export_state("jmp", static, static.start()))[0] == static == Static(64.0)
    no_op = preset("jmp", "NoOpLossScale")
    assert import_state("jmp", export_state("jmp", no_op, no_op.start()))[0] == no_op == NoScaling()


def test_jmp_dynamic_is_exported_with_its_floor() -> None:
    policy = Dynamic(init_scale=64.0, growth_interval=5, min_scale=4.0)
    exported = export_state("jmp", policy, policy.start())
    assert exported == {"loss_scale": 64.0, "counter": 0, "period": 5, "factor": 2.0, "min_loss_scale": 4.0}
    assert exported["loss_scale"].dtype == np.float32
    assert exported["counter"].dtype == np.int32


def test_keras_scale_that_reached_infinity_stays_there() -> None:
    policy = preset("keras", initial_scale=2.0**126, dynamic_growth_steps=1)
    assert scales(policy, [False] * 3 + [True] * 2) == [2.0**127, math.inf, math.inf, math.inf, math.inf]


def test_keras_scale_below_the_normal_numbers_is_zero_and_stays_there() -> None:
    policy = preset("keras", initial_scale=2.0**-125, dynamic_growth_steps=1)
    assert scales(policy, [True, True, False, True]) == [2.0**-126, 0.0, 0.0, 0.0]
    assert bool(walked(policy, [True] * 3).stuck)


def test_keras_variables_saved_by_index_are_found() -> None:
    saved = {"0": 7, "1": 0.0, "2": np.int32(5), "3": np.asarray(512.0, np.float32), "4": np.ones((2, 2))}
    policy, state = import_state("keras", saved)
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 5)
    assert policy == preset("keras")


def test_keras_variables_are_found_in_a_weights_file() -> None:
    saved = {"layers": {}, "optimizer": {"vars": {"0": 7, "1": 0.0, "2": 5, "3": 512.0}}, "vars": {}}
    assert float(import_state("keras", saved)[1].scale) == 512.0


def test_keras_variables_are_found_by_path_among_those_of_the_inner_optimizer() -> None:
    saved = {"opt/step_counter": 5, "opt/dynamic_scale": 512.0, "adam/iteration": 9, "adam/momentum": np.ones(3)}
    policy, state = import_state("keras", saved)
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 5)
    assert float(advanced(policy, state, True).scale) == 256.0


def test_keras_import_of_infinity_is_stuck_at_the_next_overflow() -> None:
    policy, state = import_state("keras", {"step_counter": 0, "dynamic_scale": math.inf})
    assert bool(advanced(policy, state, True).stuck)


def test_keras_dynamic_is_exported_with_its_counters_and_settings() -> None:
    policy = Dynamic(init_scale=1024.0, growth_interval=7)
    assert export_state("keras", policy, replace(policy.start(), clean_steps=np.int32(3))) == {
        "step_counter": 3,
        "dynamic_scale": 1024.0,
        "initial_scale": 1024.0,
        "dynamic_growth_steps": 7,
    }


def test_tf_keras_scale_never_falls_below_one() -> None:
    assert scales(preset("tf-keras", initial_scale=3.0), [True, True, True]) == [1.5, 1.0, 1.0]


def test_tf_keras_scale_below_one_is_raised_to_one_by_an_overflow() -> None:
    assert scales(preset("tf-keras", initial_scale=0.25), [True]) == [1.0]


def test_tf_keras_growth_to_infinity_is_not_taken_but_counted_as_growth() -> None:
    policy = preset("tf-keras", initial_scale=2.0**127, dynamic_growth_steps=2)
    assert scales(policy, [False] * 4) == [2.0**127] * 4
    assert int(walked(policy, [False] * 3).clean_steps) == 1


def test_tf_keras_counter_past_the_period_still_grows() -> None:
    saved = {"current_loss_scale": 8.0, "good_steps": 9, "dynamic_growth_steps": 4}
    policy, state = import_state("tf-keras", saved)
    state = advanced(policy, state, False)
    assert (float(state.scale), int(state.clean_steps)) == (16.0, 0)


def test_tf_keras_graph_and_eager_differ_in_the_last_bit_only() -> None:
    eager = scales(preset("tf-keras", "DynamicLossScale", multiplier=3.0), [True] * 5)
    graph = scales(preset("tf-keras", "DynamicLossScale (graph)", multiplier=3.0), [True] * 5)
    assert eager != graph
    assert np.allclose(eager, graph, rtol=3e-7, atol=0)


def test_tf_keras_qualified_name_without_a_note_means_the_rule_without_one() -> None:
    assert preset("tf-keras", "tf.compat.v1.mixed_precision.DynamicLossScale") == preset("tf-keras", "DynamicLossScale")


def test_tf_keras_scale_that_is_not_dynamic_is_static() -> None:
    assert preset("tf-keras", dynamic=False, initial_scale=64.0) == Static(64.0)
    assert preset("tf-keras", "FixedLossScale", loss_scale_value=64) == Static(64.0)


@pytest.mark.parametrize(
    "config", [{"dynamic": False}, {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}]
)
def test_tf_keras_fixed_scale_needs_a_scale_and_nothing_else(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`dynamic=False` takes `initial_scale`"):
        preset("tf-keras", **config)


def test_tf_keras_variables_are_found_in_a_tensorflow_checkpoint() -> None:
    saved = {
        f"opt/loss_scale/current_loss_scale{SUFFIX}": np.float32(512.0),
        f"opt/loss_scale/good_steps{SUFFIX}": np.int64(5),
        f"opt/_learning_rate{SUFFIX}": np.float32(0.1),
        "_CHECKPOINTABLE_OBJECT_GRAPH": b"",
    }
    policy, state = import_state("tf-keras", saved)
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 5)
    assert policy == preset("tf-keras")


def test_tf_keras_export_uses_the_names_of_tf1_only_for_its_multiplier() -> None:
    of_keras = preset("tf-keras", initial_scale=64.0)
    assert export_state("tf-keras", of_keras, of_keras.start()) == {
        "current_loss_scale": 64.0,
        "good_steps": 0,
        "initial_scale": 64.0,
        "dynamic_growth_steps": 2000,
    }
    of_tf1 = preset("tf-keras", "DynamicLossScale", initial_loss_scale=64.0, multiplier=4.0)
    assert export_state("tf-keras", of_tf1, of_tf1.start()) == {
        "current_loss_scale": 64.0,
        "good_steps": 0,
        "initial_loss_scale": 64.0,
        "increment_period": 2000,
        "multiplier": 4.0,
    }
