"""The rules of MindSpore, OpenSeq2Seq, Paddle, PopART, MXNet and Chainer, and their states."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.test_sequences import ROWS, states_of
from tests.peers.test_states import MINDSPORE, PADDLE
from tests.peers.walk import FLAGS, advanced, scales, walked

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling, Static

STREAM = st.lists(st.tuples(st.booleans(), st.floats(2.0**-24, 2.0**15, width=32)), max_size=30)
SHARES = st.lists(st.sampled_from([0.0, 1e-8, 2e-7, 0.5]), max_size=40)


def test_mindspore_cell_is_stuck_at_infinity_where_the_scaler_of_amp_stops_growing() -> None:
    cell = preset("mindspore", loss_scale_value=2.0**127, scale_factor=2, scale_window=1)
    amp = preset("mindspore", "amp.DynamicLossScaler", scale_value=2.0**127, scale_factor=2, scale_window=1)
    assert scales(cell, [False, True]) == [math.inf, math.inf]
    assert bool(walked(cell, [False, True]).stuck)
    assert scales(amp, [False, True]) == [2.0**127, 2.0**126]


def test_mindspore_manager_is_stuck_after_more_than_a_thousand_overflows_in_a_row_and_not_before() -> None:
    policy = preset("mindspore", "DynamicLossScaleManager")
    state = walked(policy, [True] * 500 + [False] + [True] * 1000)
    assert float(state.scale) == 1.0
    assert not bool(state.stuck)
    state = advanced(policy, state, True)
    assert bool(state.stuck)
    assert not bool(advanced(policy, state, False).stuck)


@given(FLAGS, st.integers(1, 5), st.sampled_from([2, 3, 1.7]))
def test_mindspore_manager_follows_its_rule_in_python_floats(flags: list[bool], window: int, factor: float) -> None:
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
def test_mindspore_fixed_scales_are_static(variant: str, config: dict[str, Any]) -> None:
    assert preset("mindspore", variant, **config) == Static(64.0)


def test_mindspore_steps_of_the_cell_are_counted_from_one() -> None:
    policy = preset("mindspore", loss_scale_value=100.0, scale_factor=2, scale_window=10)
    exported = export_state("mindspore", policy, walked(policy, [False, True, False, False]))
    assert exported == {
        "scale_sense": 50.0,
        "current_iterator_step": 5,
        "last_overflow_iterator_step": 2,
        "scale_factor": 2.0,
        "scale_window": 10,
    }


def test_mindspore_parameters_are_found_in_a_checkpoint() -> None:
    arrays = {name: np.asarray([value]) for name, value in MINDSPORE.items()}
    saved = {"weight": np.ones((2, 2)), "global_step": np.ones(1, np.int32), "moments.weight": np.ones(2), **arrays}
    policy, state = import_state("mindspore", saved)
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 3)
    assert float(advanced(policy, state, True).scale) == 256.0


def test_mindspore_scale_at_infinity_is_imported_as_it_is() -> None:
    policy, state = import_state("mindspore", MINDSPORE | {"scale_sense": math.inf})
    assert bool(advanced(policy, state, True).stuck)


def test_mindspore_counter_past_the_window_grows_the_scale_in_the_cell() -> None:
    policy, state = import_state("mindspore", MINDSPORE | {"scale_window": 2})
    assert float(advanced(policy, state, False).scale) == 1024.0


def test_mindspore_counter_past_the_window_wraps_round_in_the_scaler_of_amp() -> None:
    policy, state = import_state("mindspore", {"scale_value": 512.0, "counter": 5, "scale_window": 2})
    assert export_state("mindspore", policy, state)["counter"] % 2 == 1
    first = advanced(policy, state, False)
    assert (float(first.scale), int(first.clean_steps)) == (512.0, 0)
    assert float(advanced(policy, advanced(policy, first, False), False).scale) == 1024.0


@pytest.mark.parametrize("saved", [{"scale_sense": 64.0}, {"scale_value": np.float32(64.0)}])
def test_mindspore_scale_without_counters_is_static(saved: dict[str, Any]) -> None:
    assert import_state("mindspore", saved)[0] == Static(64.0)


def test_mindspore_static_scale_is_exported_as_the_parameter_of_the_fixed_cell() -> None:
    assert export_state("mindspore", Static(64.0), Static(64.0).start()) == {"scale_sense": 64.0}


def with_amaxes(policy: Policy, state: Any, stream: list[tuple[bool, float]]) -> tuple[list[float], Any]:
    seen: list[float] = []
    for overflow, amax in stream:
        state = advanced(policy, state, overflow, amax=amax)
        seen.append(float(state.scale))
    return seen, state


def test_openseq2seq_backoff_starts_from_its_upper_bound_and_keeps_to_both() -> None:
    policy = preset("openseq2seq", scale_min=3.0, scale_max=16.0, step_window=1)
    assert float(policy.start().scale) == 16.0
    assert scales(policy, [False, True, True, True, True]) == [16.0, 8.0, 4.0, 3.0, 3.0]


def test_openseq2seq_log_max_needs_amax_and_starts_from_one() -> None:
    policy = preset("openseq2seq", "LogMaxScaler")
    assert policy.needs == {"finite", "loss_finite", "amax"}
    assert float(policy.start().scale) == 1.0


def test_openseq2seq_log_max_puts_a_steady_amax_just_below_the_top_of_fp16() -> None:
    policy = preset("openseq2seq", "LogMaxScaler", scale_max=2.0**24)
    seen, _ = with_amaxes(policy, policy.start(), [(False, 4.0)] * 50)
    assert seen[-1] == pytest.approx(2.0**14, rel=0.02)


def test_openseq2seq_log_max_falls_to_its_lower_bound_on_overflow_and_is_stuck_there() -> None:
    policy = preset("openseq2seq", "LogMaxScaler", scale_min=2.0)
    _, state = with_amaxes(policy, policy.start(), [(False, 4.0)] * 3)
    state = advanced(policy, state, True)
    assert (float(state.scale), bool(state.stuck)) == (2.0, False)
    assert bool(advanced(policy, state, True).stuck)


def test_openseq2seq_log_max_takes_an_infinite_amax_for_an_overflow() -> None:
    policy = preset("openseq2seq", "LogMaxScaler")
    by_flag = advanced(policy, policy.start(), True)
    assert advanced(policy, policy.start(), False, amax=math.inf) == by_flag
    assert int(by_flag.skipped) == 1


@pytest.mark.parametrize("before", [[], [(False, 3.0), (True, 1.0), (False, 5.0)]], ids=["at first", "later"])
def test_openseq2seq_log_max_goes_on_after_steps_whose_gradients_are_all_zero_as_if_there_were_none(
    before: list[tuple[bool, float]],
) -> None:
    policy = preset("openseq2seq", "LogMaxScaler")
    _, state = with_amaxes(policy, policy.start(), before)
    scales, after = with_amaxes(policy, state, [(False, 0.0), (False, 0.0)])
    assert scales == [float(state.scale)] * 2
    assert replace(after, applied=state.applied, consecutive_skips=state.consecutive_skips) == state
    assert int(after.applied) == int(state.applied) + 2
    further = [(False, 1.0), (False, 2.0)]
    assert with_amaxes(policy, after, further)[0] == with_amaxes(policy, state, further)[0]


@given(STREAM, STREAM)
def test_openseq2seq_exported_state_of_log_max_goes_on_as_before(
    before: list[tuple[bool, float]], after: list[tuple[bool, float]]
) -> None:
    policy = preset("openseq2seq", "LogMaxScaler", scale_max=1e6, beta1=0.9, beta2=0.95, log_max=5.0)
    _, state = with_amaxes(policy, policy.start(), before)
    other_policy, other = import_state("openseq2seq", export_state("openseq2seq", policy, state))
    assert other_policy == policy
    assert with_amaxes(other_policy, other, after)[0] == with_amaxes(policy, state, after)[0]


@pytest.mark.parametrize("prefix", ["", "Loss_Optimization/"])
def test_openseq2seq_unnamed_variables_are_known_by_the_order_of_their_creation(prefix: str) -> None:
    saved = {f"{prefix}Variable_2": np.float32(512.0), f"{prefix}Variable": 12, f"{prefix}Variable_1": 9}
    others = {"global_step": np.int64(12), "dense/kernel": np.ones((2, 2))}
    policy, state = import_state("openseq2seq", saved | others | {"step_window": np.int64(5)})
    assert (float(state.scale), int(state.clean_steps)) == (512.0, 3)
    assert float(advanced(policy, advanced(policy, state, False), False).scale) == 1024.0


def test_openseq2seq_unnamed_variables_may_come_as_a_list() -> None:
    policy = preset("openseq2seq", "LogMaxScaler")
    _, state = with_amaxes(policy, policy.start(), [(False, 3.0), (True, 1.0), (False, 5.0)])
    named = export_state("openseq2seq", policy, state)
    variables = [value for name, value in named.items() if name in (*list(named)[:7],)]
    assert (
        with_amaxes(*import_state("openseq2seq", variables), [(False, 2.0)])[0]
        == with_amaxes(policy, state, [(False, 2.0)])[0]
    )


def test_openseq2seq_variables_numbered_later_keep_their_order() -> None:
    saved = {"Variable_10": 512.0, "Variable_9": 9, "Variable_8": 12}
    assert int(import_state("openseq2seq", saved)[1].clean_steps) == 3


def test_openseq2seq_bounds_of_dynamic_are_exported_even_where_they_are_the_default() -> None:
    exported = export_state("openseq2seq", Dynamic(), Dynamic().start())
    assert (exported["scale_min"], exported["scale_max"]) == (1.0, 2.0**126)


def test_paddle_backoff_takes_overflows_in_a_row_and_as_many_again() -> None:
    policy = preset("paddle", init_loss_scaling=64.0, decr_every_n_nan_or_inf=2)
    flags = [True, False, True, True, True, True]
    assert scales(policy, flags) == [64.0, 64.0, 64.0, 32.0, 32.0, 16.0]


def test_paddle_scale_has_no_bounds() -> None:
    assert scales(preset("paddle", init_loss_scaling=2.0**127, incr_every_n_steps=1), [False, True]) == [math.inf] * 2
    assert scales(preset("paddle", init_loss_scaling=2.0**-148), [True, True]) == [2.0**-149, 0.0]


def test_paddle_amp_scaler_has_defaults_of_its_own() -> None:
    assert preset("paddle", "AmpScaler") == preset("paddle", init_loss_scaling=2.0**15, incr_every_n_steps=1000)


def test_paddle_disabled_and_fixed_scalers_are_policies_of_ours() -> None:
    assert preset("paddle", enable=False) == NoScaling()
    assert preset("paddle", use_dynamic_loss_scaling=False, init_loss_scaling=64.0) == Static(64.0)


def test_paddle_import_and_export_are_inverse_in_every_key() -> None:
    assert export_state("paddle", *import_state("paddle", PADDLE)) == PADDLE


def test_paddle_import_goes_on_with_the_overflows_counted_so_far() -> None:
    policy, state = import_state("paddle", PADDLE)
    assert float(advanced(policy, state, True).scale) == 128.0


def test_paddle_empty_dict_of_a_disabled_scaler_is_written_but_not_read() -> None:
    assert export_state("paddle", NoScaling(), NoScaling().start()) == {}
    with pytest.raises(ValueError, match=r"scaler that was disabled.*Received: an empty dict.*`NoScaling\(\)`"):
        import_state("paddle", {})


def test_paddle_static_scale_comes_back_as_static() -> None:
    exported = export_state("paddle", Static(64.0), Static(64.0).start())
    assert exported["use_dynamic_loss_scaling"] is False
    assert import_state("paddle", exported)[0] == Static(64.0)


def test_paddle_import_names_the_missing_key() -> None:
    with pytest.raises(ValueError, match=r"missing: \['decr_count'\]"):
        import_state("paddle", {key: value for key, value in PADDLE.items() if key != "decr_count"})


def with_shares(policy: Policy, state: Any, shares: list[float]) -> tuple[list[float], Any]:
    seen: list[float] = []
    for share in shares:
        state = advanced(policy, state, False, upper_share=share)
        seen.append(float(state.scale))
    return seen, state


def test_popart_scale_halves_above_the_threshold_and_doubles_otherwise() -> None:
    policy = preset("popart", lossScaling=64.0, thresholdUpperCountProportion=0.25)
    assert with_shares(policy, policy.start(), [0.5, 0.25, 0.0])[0] == [32.0, 64.0, 128.0]


def test_popart_first_step_updates_and_then_each_of_the_period() -> None:
    policy = preset("popart", lossScaling=64.0, updatePeriod=3)
    assert with_shares(policy, policy.start(), [0.0] * 7)[0] == [128.0, 128.0, 128.0, 256.0, 256.0, 256.0, 512.0]


def test_popart_scale_is_clipped_to_what_fp16_holds() -> None:
    policy = preset("popart", lossScaling=2.0**14)
    assert with_shares(policy, policy.start(), [0.0, 0.0, 1.0])[0] == [2.0**15, 2.0**15, 2.0**14]
    policy = preset("popart", lossScaling=2.0**14, clipOutput=False)
    assert with_shares(policy, policy.start(), [0.0, 0.0, 1.0])[0] == [2.0**15, 2.0**16, 2.0**15]


def test_popart_odd_scale_is_clipped_off_the_powers_of_two() -> None:
    policy = preset("popart", lossScaling=24576.0)
    assert with_shares(policy, policy.start(), [0.0, 1.0])[0] == pytest.approx([2.0**15, 2.0**14], rel=1e-6)


def test_popart_overflow_counts_as_a_gradient_above_the_edge() -> None:
    policy = preset("popart", lossScaling=64.0)
    state = advanced(policy, policy.start(), True)
    assert (float(state.scale), int(state.skipped), bool(state.stuck)) == (32.0, 1, False)


def test_popart_scale_stops_at_the_lowest_that_divides_gradients_is_stuck_there_and_rises_again() -> None:
    policy = preset("popart", lossScaling=2.0**-120)
    scales, state = with_shares(policy, policy.start(), [1.0] * 200)
    assert scales[5:] == [2.0**-126] * 195
    assert bool(state.stuck)
    assert with_shares(policy, state, [0.0, 0.0])[0] == [2.0**-125, 2.0**-124]


def test_popart_scale_that_is_not_clipped_stops_at_the_highest_and_falls_again() -> None:
    policy = preset("popart", lossScaling=2.0**120, clipOutput=False)
    scales, state = with_shares(policy, policy.start(), [0.0] * 20)
    assert scales[6:] == [2.0**126] * 14
    assert with_shares(policy, state, [1.0])[0] == [2.0**125]


@pytest.mark.parametrize("scale", [0.0, 1e-46, 2.0**-127, 2.0**127, math.inf, math.nan])
def test_popart_loss_scaling_that_gradients_cannot_be_divided_by_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"`lossScaling` must lie between 2\*\*-126 and 2\*\*126"):
        preset("popart", lossScaling=scale)


def test_popart_scale_that_is_not_automatic_is_fixed() -> None:
    assert preset("popart", enabled=False) == NoScaling()
    assert preset("popart", enabled=False, lossScaling=64.0) == Static(64.0)


@given(SHARES, SHARES, st.integers(1, 4), st.booleans())
def test_popart_exported_state_goes_on_as_before(
    before: list[float], after: list[float], period: int, clips: bool
) -> None:
    policy = preset("popart", lossScaling=100.0, updatePeriod=period, clipOutput=clips)
    _, state = with_shares(policy, policy.start(), before)
    other_policy, other = import_state("popart", export_state("popart", policy, state))
    assert other_policy == policy
    assert with_shares(other_policy, other, after)[0] == with_shares(policy, state, after)[0]


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
    assert with_shares(policy, state, [0.0, 0.0])[0] == [256.0, 512.0]


def test_popart_static_scale_is_exported_as_the_setting_of_the_optimizer() -> None:
    exported = export_state("popart", Static(64.0), Static(64.0).start())
    assert exported == {"lossScaling": 64.0}
    assert import_state("popart", exported)[0] == Static(64.0)


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


def test_mxnet_scale_falls_to_zero_and_is_stuck_there() -> None:
    policy = preset("mxnet", loss_scale=5e-324)
    state = advanced(policy, policy.start(), True)
    assert float(state.scale) == 0.0
    assert not bool(state.stuck)
    assert bool(advanced(policy, state, True).stuck)


def test_mxnet_start_above_the_ceiling_is_lowered_by_growth() -> None:
    assert scales(preset("mxnet", loss_scale=64.0, max_loss_scale=16.0, scale_seq_len=2), [False, False]) == [
        64.0,
        16.0,
    ]


def test_chainer_scale_doubles_from_one_to_the_largest_fp16_number_until_the_first_overflow() -> None:
    assert scales(preset("chainer"), [False] * 17)[-3:] == [32768.0, 65504.0, 65504.0]


def test_chainer_scale_creeps_after_the_first_overflow() -> None:
    creep = 2.0 ** (1.0 / 3.0)
    assert scales(preset("chainer", interval=3), [False, False, True, False, False]) == [
        2.0,
        4.0,
        2.0,
        2.0 * creep,
        2.0 * creep * creep,
    ]


@given(FLAGS, st.sampled_from([1, 2, 2.5, 7, 1000]))
def test_preset_follows_the_rule_of_chainer(flags: list[bool], interval: float) -> None:
    scale, ever, seen = 1.0, False, []
    for overflow in flags:
        ever = ever or overflow
        factor = 0.5 if overflow else math.pow(2.0, 1.0 / interval) if ever else 2.0
        scale = max(1.0, min(65504.0, scale * factor))
        seen.append(scale)
    assert scales(preset("chainer", interval=interval), flags) == seen


def test_chainer_state_is_stuck_where_an_overflow_finds_the_scale_at_one() -> None:
    policy = preset("chainer")
    assert bool(advanced(policy, policy.start(), True).stuck)
    assert not bool(walked(policy, [False, True]).stuck)


def test_chainer_given_scale_is_static() -> None:
    assert preset("chainer", "Optimizer.loss_scaling", scale=128.0) == Static(128.0)
