"""MXNet's `LossScaler`, and its lag."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.test_sequences import ROWS, states_of
from tests.peers.walk import advanced, scales

from gradscale.peers import export_state, import_state, preset

FLAGS = st.lists(st.booleans(), max_size=60)


@pytest.mark.parametrize("row", [row for row in ROWS if "loss_scale_property" in row], ids=lambda row: row["id"])
def test_public_scale_is_the_loss_scale_that_mxnet_shows(row: dict[str, Any]) -> None:
    assert [float(state.public_scale) for state in states_of(row)] == row["loss_scale_property"]


@given(
    FLAGS,
    st.fixed_dictionaries(
        {
            "loss_scale": st.sampled_from([1e-320, 3.0, 100.0, 65536.0, 1e300]),
            "scale_seq_len": st.integers(1, 5),
            "max_loss_scale": st.sampled_from([1.0, 1000.0, 2.0**24, 1.7e308]),
        }
    ),
)
def test_preset_follows_the_two_scales_of_mxnet(flags: list[bool], config: dict[str, Any]) -> None:
    policy = preset("mxnet", **config)
    state = policy.start()
    following, unskipped = config["loss_scale"], 0
    for overflow in flags:
        shown = following
        unskipped = 0 if overflow else unskipped + 1
        if overflow:
            following = shown / 2.0
        if unskipped == config["scale_seq_len"]:
            unskipped, following = 0, min(config["max_loss_scale"], shown * 2.0)
        state = advanced(policy, state, overflow)
        assert (float(state.scale), float(state.public_scale)) == (following, shown)
        assert int(state.clean_steps) == unskipped


def test_scale_falls_to_zero_and_is_stuck_there() -> None:
    policy = preset("mxnet", loss_scale=5e-324)
    state = advanced(policy, policy.start(), True)
    assert float(state.scale) == 0.0
    assert not bool(state.stuck)
    assert bool(advanced(policy, state, True).stuck)


def test_start_above_the_ceiling_is_lowered_by_growth() -> None:
    assert scales(preset("mxnet", loss_scale=64.0, max_loss_scale=16.0, scale_seq_len=2), [False, False]) == [
        64.0,
        16.0,
    ]


def test_mxnet_saves_and_loads_nothing() -> None:
    policy = preset("mxnet")
    with pytest.raises(ValueError, match="mxnet saves no state"):
        import_state("mxnet", {})
    with pytest.raises(ValueError, match="mxnet loads no state"):
        export_state("mxnet", policy, policy.start())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"loss_scale": 0.0}, "`loss_scale` must be positive"),
        ({"scale_seq_len": 0}, "`scale_seq_len` must be between 1"),
        ({"max_loss_scale": -1.0}, "`max_loss_scale` must be positive"),
    ],
)
def test_preset_refuses_settings_that_cannot_work(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        preset("mxnet", **config)
