"""PopART's automatic loss scaling."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import advanced

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling, Static

SHARES = st.lists(st.sampled_from([0.0, 1e-8, 2e-7, 0.5]), max_size=40)


def run(policy: Policy, state: Any, shares: list[float]) -> tuple[list[float], Any]:
    seen: list[float] = []
    for share in shares:
        state = advanced(policy, state, False, upper_share=share)
        seen.append(float(state.scale))
    return seen, state


def test_scale_halves_above_the_threshold_and_doubles_otherwise() -> None:
    policy = preset("popart", lossScaling=64.0, thresholdUpperCountProportion=0.25)
    assert run(policy, policy.start(), [0.5, 0.25, 0.0])[0] == [32.0, 64.0, 128.0]


def test_first_step_updates_and_then_each_of_the_period() -> None:
    policy = preset("popart", lossScaling=64.0, updatePeriod=3)
    assert run(policy, policy.start(), [0.0] * 7)[0] == [128.0, 128.0, 128.0, 256.0, 256.0, 256.0, 512.0]


def test_scale_is_clipped_to_what_fp16_holds() -> None:
    policy = preset("popart", lossScaling=2.0**14)
    assert run(policy, policy.start(), [0.0, 0.0, 1.0])[0] == [2.0**15, 2.0**15, 2.0**14]
    policy = preset("popart", lossScaling=2.0**14, clipOutput=False)
    assert run(policy, policy.start(), [0.0, 0.0, 1.0])[0] == [2.0**15, 2.0**16, 2.0**15]


def test_odd_scale_is_clipped_off_the_powers_of_two() -> None:
    policy = preset("popart", lossScaling=24576.0)
    assert run(policy, policy.start(), [0.0, 1.0])[0] == pytest.approx([2.0**15, 2.0**14], rel=1e-6)


def test_overflow_counts_as_a_gradient_above_the_edge() -> None:
    policy = preset("popart", lossScaling=64.0)
    state = advanced(policy, policy.start(), True)
    assert (float(state.scale), int(state.skipped), bool(state.stuck)) == (32.0, 1, False)


def test_scale_stops_at_the_lowest_that_divides_gradients_is_stuck_there_and_rises_again() -> None:
    policy = preset("popart", lossScaling=2.0**-120)
    scales, state = run(policy, policy.start(), [1.0] * 200)
    assert scales[5:] == [2.0**-126] * 195
    assert bool(state.stuck)
    assert run(policy, state, [0.0, 0.0])[0] == [2.0**-125, 2.0**-124]


def test_scale_that_is_not_clipped_stops_at_the_highest_and_falls_again() -> None:
    policy = preset("popart", lossScaling=2.0**120, clipOutput=False)
    scales, state = run(policy, policy.start(), [0.0] * 20)
    assert scales[6:] == [2.0**126] * 14
    assert run(policy, state, [1.0])[0] == [2.0**125]


@pytest.mark.parametrize("scale", [0.0, 1e-46, 2.0**-127, 2.0**127, math.inf, math.nan])
def test_loss_scaling_that_gradients_cannot_be_divided_by_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"`lossScaling` must lie between 2\*\*-126 and 2\*\*126"):
        preset("popart", lossScaling=scale)


def test_scale_that_is_not_automatic_is_fixed() -> None:
    assert preset("popart", enabled=False) == NoScaling()
    assert preset("popart", enabled=False, lossScaling=64.0) == Static(64.0)


@given(SHARES, SHARES, st.integers(1, 4), st.booleans())
def test_exported_state_goes_on_as_before(before: list[float], after: list[float], period: int, clips: bool) -> None:
    policy = preset("popart", lossScaling=100.0, updatePeriod=period, clipOutput=clips)
    _, state = run(policy, policy.start(), before)
    other_policy, other = import_state("popart", export_state("popart", policy, state))
    assert other_policy == policy
    assert run(other_policy, other, after)[0] == run(policy, state, after)[0]


def test_variables_are_found_as_popart_saves_them() -> None:
    saved = {
        "lossScaling": 64.0,
        "lossScaleUpdateFactor": np.asarray([4.0], np.float32),
        "LossScaleUpdate_counter": np.int32(1),
        "Accum___autoLossScaleStats": np.zeros(2),
        "updatePeriod": 3,
    }
    policy, state = import_state("popart", saved)
    assert float(state.scale) == 256.0
    assert run(policy, state, [0.0, 0.0])[0] == [256.0, 512.0]


def test_static_scale_is_exported_as_the_setting_of_the_optimizer() -> None:
    exported = export_state("popart", Static(64.0), Static(64.0).start())
    assert exported == {"lossScaling": 64.0}
    assert import_state("popart", exported)[0] == Static(64.0)


def test_export_refuses_rules_that_popart_does_not_know() -> None:
    with pytest.raises(TypeError, match="PopART can continue from its own preset"):
        export_state("popart", Dynamic(), Dynamic().start())


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        ({"lossScaleUpdateFactor": 2.0}, ValueError, r"missing: \['lossScaling'\]"),
        ({"lossScaling": 2.0, "lossScaleUpdateFactor": math.nan}, ValueError, "must not be NaN"),
        ({"lossScaling": 0.0, "lossScaleUpdateFactor": 2.0}, ValueError, "`lossScaling` .* must be positive"),
        ({"lossScaling": 2.0, "lossScaleUpdateFactor": 2.0, "counter": -2}, ValueError, "`counter` .* between -1"),
        ({"lossScaling": 2.0, "lossScaleUpdateFactor": 2.0, "bogus": 2}, ValueError, r"unknown: \['bogus'\]"),
        ({"lossScaling": 2.0, "lossScaleUpdateFactor": 2.0, "clipOutput": 2}, TypeError, "`clipOutput` .* a bool"),
    ],
)
def test_import_refuses_what_popart_does_not_save(saved: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_state("popart", saved)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"thresholdUpperCountProportion": 1.5}, "`thresholdUpperCountProportion` is a share"),
        ({"updatePeriod": 0}, "`updatePeriod` must be between 1"),
        ({"lossScaling": -1.0}, "`lossScaling` must lie between"),
    ],
)
def test_preset_refuses_settings_that_cannot_work(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        preset("popart", **config)
