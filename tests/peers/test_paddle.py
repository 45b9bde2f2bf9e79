"""Paddle's `GradScaler` and `AmpScaler`."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import advanced, assert_goes_on, scales, walked

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling, Static

FLAGS = st.lists(st.booleans(), max_size=60)
SAVED: dict[str, Any] = {
    "scale": np.asarray([512.0], np.float32),
    "incr_ratio": 3.0,
    "decr_ratio": 0.25,
    "incr_every_n_steps": 7,
    "decr_every_n_nan_or_inf": 3,
    "incr_count": 0,
    "decr_count": 2,
    "use_dynamic_loss_scaling": True,
}


def test_backoff_takes_overflows_in_a_row_and_as_many_again() -> None:
    policy = preset("paddle", init_loss_scaling=64.0, decr_every_n_nan_or_inf=2)
    flags = [True, False, True, True, True, True]
    assert scales(policy, flags) == [64.0, 64.0, 64.0, 32.0, 32.0, 16.0]


def test_scale_has_no_bounds() -> None:
    assert scales(preset("paddle", init_loss_scaling=2.0**127, incr_every_n_steps=1), [False, True]) == [math.inf] * 2
    assert scales(preset("paddle", init_loss_scaling=2.0**-148), [True, True]) == [2.0**-149, 0.0]


def test_amp_scaler_has_defaults_of_its_own() -> None:
    assert preset("paddle", "AmpScaler") == preset("paddle", init_loss_scaling=2.0**15, incr_every_n_steps=1000)


def test_disabled_and_fixed_scalers_are_policies_of_ours() -> None:
    assert preset("paddle", enable=False) == NoScaling()
    assert preset("paddle", use_dynamic_loss_scaling=False, init_loss_scaling=64.0) == Static(64.0)


@given(FLAGS, FLAGS, st.integers(1, 5), st.integers(1, 4), st.sampled_from([1.5, 2.0]), st.sampled_from([0.3, 0.5]))
def test_exported_state_goes_on_as_before(
    before: list[bool], after: list[bool], steps: int, every: int, growth: float, backoff: float
) -> None:
    config: dict[str, Any] = {"incr_every_n_steps": steps, "decr_every_n_nan_or_inf": every}
    policy = preset("paddle", init_loss_scaling=100.0, incr_ratio=growth, decr_ratio=backoff, **config)
    assert_goes_on("paddle", policy, walked(policy, before), after)


def test_import_and_export_are_inverse_in_every_key() -> None:
    assert export_state("paddle", *import_state("paddle", SAVED)) == SAVED


def test_import_goes_on_with_the_overflows_counted_so_far() -> None:
    policy, state = import_state("paddle", SAVED)
    assert float(advanced(policy, state, True).scale) == 128.0


def test_empty_dict_of_a_disabled_scaler_is_written_but_not_read() -> None:
    assert export_state("paddle", NoScaling(), NoScaling().start()) == {}
    with pytest.raises(ValueError, match=r"scaler that was disabled.*Received: an empty dict.*`NoScaling\(\)`"):
        import_state("paddle", {})


def test_static_scale_comes_back_as_static() -> None:
    exported = export_state("paddle", Static(64.0), Static(64.0).start())
    assert exported["use_dynamic_loss_scaling"] is False
    assert import_state("paddle", exported)[0] == Static(64.0)


def test_dynamic_without_hysteresis_goes_on_in_paddle_as_before() -> None:
    policy = Dynamic(init_scale=2.0**20, growth_interval=3)
    assert_goes_on("paddle", policy, walked(policy, [True, True, False]), [True, False, False, False, True])


def test_export_refuses_hysteresis_that_paddle_does_not_have() -> None:
    policy = Dynamic(hysteresis=2, refill="clean")
    with pytest.raises(ValueError, match="Paddle's GradScaler has refill='clean or backoff'"):
        export_state("paddle", policy, policy.start())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"decr_count": 3}, ValueError, "`decr_count` .* must be below `decr_every_n_nan_or_inf`"),
        ({"incr_count": -1}, ValueError, "`incr_count` .* between 0 and"),
        ({"scale": np.asarray([math.nan])}, ValueError, "`scale` .* must not be NaN"),
        ({"scale": np.ones(2)}, TypeError, "`scale` .* must be a number"),
        ({"incr_ratio": 0.0}, ValueError, "`incr_ratio` must be greater than 1"),
        ({"use_dynamic_loss_scaling": 1}, TypeError, "`use_dynamic_loss_scaling` .* must be a bool"),
        ({"bogus": 1}, ValueError, r"unknown: \['bogus'\]"),
    ],
)
def test_import_refuses_what_paddle_does_not_save(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_state("paddle", SAVED | change)


def test_import_names_the_missing_key() -> None:
    with pytest.raises(ValueError, match=r"missing: \['decr_count'\]"):
        import_state("paddle", {key: value for key, value in SAVED.items() if key != "decr_count"})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"incr_ratio": 1.0}, "`incr_ratio` must be greater than 1"),
        ({"decr_ratio": 1.0}, "`decr_ratio` must be between 0 and 1"),
        ({"decr_every_n_nan_or_inf": 0}, "`decr_every_n_nan_or_inf` must be between 1"),
    ],
)
def test_preset_refuses_settings_that_paddle_refuses(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        preset("paddle", **config)
