"""tf-keras' `LossScaleOptimizer` and TF1's loss scales."""

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
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def test_scale_never_falls_below_one() -> None:
    assert scales(preset("tf-keras", initial_scale=3.0), [True, True, True]) == [1.5, 1.0, 1.0]


def test_scale_below_one_is_raised_to_one_by_an_overflow() -> None:
    assert scales(preset("tf-keras", initial_scale=0.25), [True]) == [1.0]


def test_growth_to_infinity_is_not_taken_but_counted_as_growth() -> None:
    policy = preset("tf-keras", initial_scale=2.0**127, dynamic_growth_steps=2)
    assert scales(policy, [False] * 4) == [2.0**127] * 4
    assert int(walked(policy, [False] * 3).clean_steps) == 1


def test_counter_past_the_period_still_grows() -> None:
    saved = {"current_loss_scale": 8.0, "good_steps": 9, "dynamic_growth_steps": 4}
    policy, state = import_state("tf-keras", saved)
    state = advanced(policy, state, False)
    assert (float(state.scale), int(state.clean_steps)) == (16.0, 0)


def test_graph_and_eager_differ_in_the_last_bit_only() -> None:
    eager = scales(preset("tf-keras", "DynamicLossScale", multiplier=3.0), [True] * 5)
    graph = scales(preset("tf-keras", "DynamicLossScale (graph)", multiplier=3.0), [True] * 5)
    assert eager != graph
    assert np.allclose(eager, graph, rtol=3e-7, atol=0)


def test_qualified_name_without_a_note_means_the_rule_without_one() -> None:
    assert preset("tf-keras", "tf.compat.v1.mixed_precision.DynamicLossScale") == preset("tf-keras", "DynamicLossScale")


def test_scale_that_is_not_dynamic_is_static() -> None:
    assert preset("tf-keras", dynamic=False, initial_scale=64.0) == Static(64.0)
    assert preset("tf-keras", "FixedLossScale", loss_scale_value=64) == Static(64.0)


@pytest.mark.parametrize(
    "config", [{"dynamic": False}, {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}]
)
def test_fixed_scale_needs_a_scale_and_nothing_else(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`dynamic=False` takes `initial_scale`"):
        preset("tf-keras", **config)


def test_fixed_scale_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="`loss_scale_value` must be at least 1"):
        preset("tf-keras", "FixedLossScale", loss_scale_value=0.5)


@given(FLAGS, FLAGS, st.integers(1, 5), st.sampled_from([2.0, 3.0, 1.7]))
def test_exported_state_goes_on_as_before(before: list[bool], after: list[bool], period: int, factor: float) -> None:
    config = {"initial_loss_scale": 100.0, "increment_period": period, "multiplier": factor}
    policy = preset("tf-keras", "DynamicLossScale", **config)
    assert_goes_on("tf-keras", policy, walked(policy, before), after)


def test_variables_are_found_in_a_tensorflow_checkpoint() -> None:
    saved = {
        f"opt/loss_scale/current_loss_scale{SUFFIX}": np.float32(512.0),
        f"opt/loss_scale/good_steps{SUFFIX}": np.int64(5),
        f"opt/_learning_rate{SUFFIX}": np.float32(0.1),
        "_CHECKPOINTABLE_OBJECT_GRAPH": b"",
    }
    policy, state = import_state("tf-keras", saved)
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 5)
    assert policy == preset("tf-keras")


def test_export_uses_the_names_of_tf1_only_for_its_multiplier() -> None:
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


def test_dynamic_with_our_floor_of_one_is_exported() -> None:
    policy = Dynamic(growth_interval=3)
    assert_goes_on("tf-keras", policy, walked(policy, [True] * 14 + [False] * 2), [True] * 4 + [False] * 6)


def test_export_refuses_two_different_factors() -> None:
    policy = Dynamic(growth_factor=4.0, backoff_factor=0.5)
    with pytest.raises(ValueError, match="grows and backs off by one factor"):
        export_state("tf-keras", policy, policy.start())


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        ({"current_loss_scale": 2.0}, ValueError, r"missing: \['good_steps'\]"),
        ({"current_loss_scale": 2.0, "good_steps": -1}, ValueError, "`good_steps` .* between 0 and"),
        ({"current_loss_scale": math.nan, "good_steps": 1}, ValueError, "must not be NaN"),
        ({"current_loss_scale": 2.0, "good_steps": 1, "period": 3}, ValueError, r"unknown: \['period'\]"),
        ({"current_loss_scale": 2.0, "good_steps": "1"}, TypeError, "`good_steps` .* must be an integer"),
    ],
)
def test_import_refuses_what_tf_keras_does_not_save(saved: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_state("tf-keras", saved)
