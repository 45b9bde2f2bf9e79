"""States of systems other than PyTorch's: written and read back, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.walk import FLAGS, assert_goes_on, walked

from gradscale.engine.saved import policy_from_dict
from gradscale.peers import export_state, import_state, preset
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import Static

MINDSPORE = {"scale_sense": 512.0, "current_iterator_step": 9, "last_overflow_iterator_step": 5}
OPENSEQ2SEQ = {"iteration": 12, "last_overflow_iteration": 9, "scale": 512.0}
PADDLE: dict[str, Any] = {
    "scale": np.asarray([512.0], np.float32),
    "incr_ratio": 3.0,
    "decr_ratio": 0.25,
    "incr_every_n_steps": 7,
    "decr_every_n_nan_or_inf": 3,
    "incr_count": 0,
    "decr_count": 2,
    "use_dynamic_loss_scaling": True,
}

WHOLE, FACTORS = st.integers(1, 5), st.sampled_from([2.0, 3.0, 1.7])
FLAX = {
    "growth_interval": st.integers(0, 4),
    "growth_factor": st.sampled_from([2.0, 3.0]),
    "backoff_factor": st.sampled_from([0.5, 0.3]),
    "minimum_scale": st.just(5.0),
}
JMP = {"period": WHOLE, "factor": FACTORS, "min_loss_scale": st.sampled_from([0.0, 0.5, 64.0])}
RULES: list[tuple[str, str | None, dict[str, Any], dict[str, Any]]] = [
    ("flax", None, {"scale": 100.0}, FLAX),
    ("jmp", None, {"loss_scale": 100.0}, JMP),
    ("keras", None, {"initial_scale": 100.0}, {"dynamic_growth_steps": WHOLE}),
    ("tf-keras", "DynamicLossScale", {"initial_loss_scale": 100.0}, {"increment_period": WHOLE, "multiplier": FACTORS}),
    ("mindspore", None, {"loss_scale_value": 100.0}, {"scale_factor": FACTORS, "scale_window": WHOLE}),
    ("mindspore", "amp.DynamicLossScaler", {"scale_value": 100.0}, {"scale_factor": FACTORS, "scale_window": WHOLE}),
    ("openseq2seq", None, {"scale_min": 0.5, "scale_max": 1000.0}, {"step_factor": FACTORS, "step_window": WHOLE}),
    (
        "paddle",
        None,
        {"init_loss_scaling": 100.0},
        {
            "incr_every_n_steps": WHOLE,
            "decr_every_n_nan_or_inf": st.integers(1, 4),
            "incr_ratio": st.sampled_from([1.5, 2.0]),
            "decr_ratio": st.sampled_from([0.3, 0.5]),
        },
    ),
]
"""System, rule, settings, and settings that vary."""


@pytest.mark.parametrize(("system", "rule", "fixed", "varied"), RULES)
@given(data=st.data())
def test_exported_state_goes_on_as_before(
    system: str, rule: str | None, fixed: dict[str, Any], varied: dict[str, Any], data: st.DataObject
) -> None:
    settings = data.draw(st.fixed_dictionaries(varied))
    policy = preset(system, rule, **fixed, **settings)
    # flax saves no settings
    beside = settings if system == "flax" else {}
    assert_goes_on(system, policy, walked(policy, data.draw(FLAGS)), data.draw(FLAGS), **beside)


FOLLOWED: list[tuple[str, Policy, list[bool], dict[str, Any]]] = [
    ("flax", Dynamic(growth_interval=3), [True, False], {"growth_interval": 2}),
    ("tf-keras", Dynamic(growth_interval=3), [True] * 14 + [False] * 2, {}),
    ("mindspore", preset("mindspore", "DynamicLossScaleManager", scale_window=3), [False, True, False], {}),
    ("mindspore", Dynamic(growth_interval=3), [True, False], {}),
    ("openseq2seq", Dynamic(64.0, growth_interval=3, min_scale=2.0, max_scale=128.0), [True, False], {}),
    ("paddle", Dynamic(init_scale=2.0**20, growth_interval=3), [True, True, False], {}),
]


@pytest.mark.parametrize(("system", "policy", "before", "beside"), FOLLOWED)
def test_policies_of_ours_go_on_in_another_system_as_before(
    system: str, policy: Policy, before: list[bool], beside: dict[str, Any]
) -> None:
    after = [True, False, False, False, True] + [False] * 8 + [True] * 9
    assert_goes_on(system, policy, walked(policy, before), after, **beside)


NOT_FOLLOWED: list[tuple[str, Policy, str]] = [
    ("flax", Dynamic(hysteresis=2), "flax's DynamicScale has hysteresis=1 and no setting for it"),
    ("flax", Static(8.0), "Received: Static"),
    ("jmp", Dynamic(hysteresis=2), "jmp's DynamicLossScale has hysteresis=1 and no setting for it"),
    *(
        ("keras", policy, "Keras's LossScaleOptimizer has .* and no setting for it")
        for policy in (
            Dynamic(growth_factor=4.0),
            Dynamic(hysteresis=2),
            Dynamic(max_scale=2.0**20),
            Dynamic(min_scale=2.0),
        )
    ),
    ("keras", Static(8.0), "Received: Static"),
    ("tf-keras", Dynamic(growth_factor=4.0, backoff_factor=0.5), "grows and backs off by one factor"),
    ("mindspore", Dynamic(growth_factor=4.0), "MindSpore grows and backs off by one factor"),
    ("openseq2seq", preset("keras"), "`scale_min` must be positive"),
    ("paddle", Dynamic(hysteresis=2, refill="clean"), "Paddle's GradScaler has refill='clean or backoff'"),
    ("popart", Dynamic(), "PopART can continue from its own preset"),
    *((system, preset(system), f"{system} loads no state") for system in ("mxnet", "chainer")),
]


@pytest.mark.parametrize(("system", "policy", "message"), NOT_FOLLOWED)
def test_what_a_system_cannot_follow_is_refused(system: str, policy: Policy, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        export_state(system, policy, policy.start())


NOT_SAVED: list[tuple[str, Any, type[Exception], str]] = [
    ("flax", {"scale": 2.0}, ValueError, r"missing: \['fin_steps'\]"),
    ("flax", {"scale": 2.0, "fin_steps": -1}, ValueError, "`fin_steps` .* between 0 and"),
    ("flax", {"scale": math.nan, "fin_steps": 0}, ValueError, "must not be NaN"),
    ("flax", {"scale": -2.0, "fin_steps": 0}, ValueError, "`scale` .* must not be negative"),
    ("flax", {"scale": 2.0, "fin_steps": 0, "bogus": 1}, ValueError, "unknown: .*bogus"),
    ("flax", {"scale": None, "fin_steps": 0}, TypeError, "`scale` .* must be a number"),
    ("jmp", {"counter": 2}, ValueError, r"missing: \['loss_scale'\]"),
    ("jmp", {"loss_scale": 2.0, "counter": -2}, ValueError, "`counter` .* between 0 and"),
    ("jmp", {"loss_scale": math.nan, "counter": 2}, ValueError, "must not be NaN"),
    ("jmp", {"loss_scale": 2.0, "counter": 1, "interval": 3}, ValueError, r"unknown: \['interval'\]"),
    ("jmp", {"loss_scale": 2.0, "counter": 1, "factor": 0.0}, ValueError, "`factor` must be positive"),
    ("jmp", {"loss_scale": 2.0, "counter": True}, TypeError, "`counter` .* must be an integer"),
    ("keras", {"step_counter": 1}, ValueError, r"missing: \['dynamic_scale'\]"),
    ("keras", {"step_counter": 1, "dynamic_scale": 2.0, "bogus": 1}, ValueError, "unknown: .*bogus"),
    ("keras", {"step_counter": 1, "dynamic_scale": math.nan}, ValueError, "`dynamic_scale` .* must not be NaN"),
    ("keras", {"step_counter": -1, "dynamic_scale": 2.0}, ValueError, "`step_counter` .* between 0 and"),
    ("keras", {"step_counter": 1.5, "dynamic_scale": 2.0}, TypeError, "`step_counter` .* must be an integer"),
    ("keras", {"step_counter": 1, "dynamic_scale": "2"}, TypeError, "`dynamic_scale` .* must be a number"),
    ("keras", {"step_counter": 1, "dynamic_scale": np.ones(2)}, TypeError, "`dynamic_scale` .* must be a number"),
    ("keras", {"a/step_counter": 1, "b/step_counter": 1, "dynamic_scale": 2.0}, ValueError, "saves one `step_counter`"),
    ("tf-keras", {"current_loss_scale": 2.0}, ValueError, r"missing: \['good_steps'\]"),
    ("tf-keras", {"current_loss_scale": 2.0, "good_steps": -1}, ValueError, "`good_steps` .* between 0 and"),
    ("tf-keras", {"current_loss_scale": math.nan, "good_steps": 1}, ValueError, "must not be NaN"),
    ("tf-keras", {"current_loss_scale": 2.0, "good_steps": 1, "period": 3}, ValueError, r"unknown: \['period'\]"),
    ("tf-keras", {"current_loss_scale": 2.0, "good_steps": "1"}, TypeError, "`good_steps` .* must be an integer"),
    ("mindspore", {"scale_sense": 2.0, "current_iterator_step": 1}, ValueError, "missing: .*last_overflow"),
    ("mindspore", MINDSPORE | {"last_overflow_iterator_step": 9}, ValueError, "must come before `current"),
    ("mindspore", MINDSPORE | {"current_iterator_step": 0}, ValueError, "`current_iterator_step` .* 1 and"),
    ("mindspore", MINDSPORE | {"scale_sense": math.nan}, ValueError, "must not be NaN"),
    ("mindspore", MINDSPORE | {"scale_windows": 3}, ValueError, r"unknown: \['scale_windows'\]"),
    ("mindspore", {"counter": 1}, ValueError, r"missing: \['scale_value'\]"),
    ("mindspore", {"scale_value": 2.0, "counter": "1"}, TypeError, "`counter` .* must be an integer"),
    ("openseq2seq", {"Variable": 1, "Variable_1": 2}, ValueError, "3 unnamed variables .* or 7 .* Received: 2"),
    ("openseq2seq", {"iteration": 1, "scale": 2.0}, ValueError, r"missing: \['last_overflow_iteration'\]"),
    ("openseq2seq", OPENSEQ2SEQ | {"last_overflow_iteration": 13}, ValueError, "must not come after `iteration`"),
    ("openseq2seq", OPENSEQ2SEQ | {"iteration": -1}, ValueError, "`iteration` .* between 0 and"),
    ("openseq2seq", OPENSEQ2SEQ | {"scale": math.nan}, ValueError, "must not be NaN"),
    ("openseq2seq", OPENSEQ2SEQ | {"window": 2}, ValueError, r"unknown: \['window'\]"),
    ("openseq2seq", OPENSEQ2SEQ | {"x_hat": 0.0}, ValueError, "missing: .*'b1_correction'"),
    ("paddle", PADDLE | {"decr_count": 3}, ValueError, "`decr_count` .* must be below `decr_every"),
    ("paddle", PADDLE | {"incr_count": -1}, ValueError, "`incr_count` .* between 0 and"),
    ("paddle", PADDLE | {"scale": np.asarray([math.nan])}, ValueError, "`scale` .* must not be NaN"),
    ("paddle", PADDLE | {"scale": np.ones(2)}, TypeError, "`scale` .* must be a number"),
    ("paddle", PADDLE | {"incr_ratio": 0.0}, ValueError, "`incr_ratio` must be greater than 1"),
    ("paddle", PADDLE | {"use_dynamic_loss_scaling": 1}, TypeError, "must be a bool"),
    ("paddle", PADDLE | {"bogus": 1}, ValueError, "unknown: .*bogus"),
    ("popart", {"lossScaleUpdateFactor": 2.0}, ValueError, r"missing: \['lossScaling'\]"),
    ("popart", {"lossScaling": 2.0, "lossScaleUpdateFactor": math.nan}, ValueError, "must not be NaN"),
    ("popart", {"lossScaling": 0.0, "lossScaleUpdateFactor": 2.0}, ValueError, "`lossScaling` .* must be positive"),
    ("popart", {"lossScaling": 2.0, "lossScaleUpdateFactor": 2.0, "counter": -2}, ValueError, "`counter` .* -1"),
    ("popart", {"lossScaling": 2.0, "lossScaleUpdateFactor": 2.0, "bogus": 2}, ValueError, "unknown: .*bogus"),
    ("popart", {"lossScaling": 2.0, "lossScaleUpdateFactor": 2.0, "clipOutput": 2}, TypeError, "must be a bool"),
    *((system, {}, ValueError, f"{system} saves no state") for system in ("mxnet", "chainer")),
]


@pytest.mark.parametrize(("system", "saved", "error", "text"), NOT_SAVED)
def test_import_refuses_what_a_system_does_not_save(system: str, saved: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        import_state(system, saved)


NOT_SET: list[tuple[str, str | None, dict[str, Any], type[Exception], str]] = [
    ("flax", None, {"growth_factor": 0.0}, ValueError, "`growth_factor` must be positive"),
    ("flax", None, {"backoff_factor": math.nan}, ValueError, "`backoff_factor` must be positive"),
    ("flax", None, {"growth_interval": -1}, ValueError, "`growth_interval` must be between"),
    ("flax", None, {"minimum_scale": -1.0}, ValueError, "`minimum_scale` must not be negative"),
    ("jmp", None, {}, TypeError, r"`preset\('jmp'\)` takes"),
    ("jmp", None, {"loss_scale": -1.0}, ValueError, "`loss_scale` must be positive"),
    ("jmp", None, {"loss_scale": 1.0, "period": 0}, ValueError, "`period` must be between 1"),
    ("jmp", None, {"loss_scale": 1.0, "counter": -1}, ValueError, "`counter` must be between 1"),
    ("jmp", None, {"loss_scale": 1.0, "min_loss_scale": math.nan}, ValueError, "`min_loss_scale` must not be"),
    ("keras", None, {"initial_scale": 0.0}, ValueError, "`initial_scale` must be positive"),
    ("keras", None, {"dynamic_growth_steps": 0}, ValueError, "`dynamic_growth_steps` must be between 1"),
    ("openseq2seq", "LogMaxScaler", {"beta1": 1.0}, ValueError, "`beta1` must lie from 0 to below 1"),
    ("openseq2seq", "LogMaxScaler", {"scale_min": 0.0}, ValueError, "`scale_min` must be positive"),
    ("openseq2seq", "LogMaxScaler", {"log_max": "16"}, TypeError, "`log_max` must be a number"),
    ("openseq2seq", "LogMaxScaler", {"log_max": 63}, ValueError, "`log_max` must lie between 0 and 62"),
    ("openseq2seq", "LogMaxScaler", {"log_max": math.nan}, ValueError, "`log_max` must lie between 0 and 62"),
    ("openseq2seq", "LogMaxScaler", {"overflow_std_dev": math.inf}, ValueError, "must lie between 0 and"),
    ("paddle", None, {"incr_ratio": 1.0}, ValueError, "`incr_ratio` must be greater than 1"),
    ("paddle", None, {"decr_ratio": 1.0}, ValueError, "`decr_ratio` must be between 0 and 1"),
    ("paddle", None, {"decr_every_n_nan_or_inf": 0}, ValueError, "must be between 1"),
    ("popart", None, {"thresholdUpperCountProportion": 1.5}, ValueError, "Proportion` is a share"),
    ("popart", None, {"updatePeriod": 0}, ValueError, "`updatePeriod` must be between 1"),
    ("popart", None, {"lossScaling": -1.0}, ValueError, "`lossScaling` must lie between"),
    ("mxnet", None, {"loss_scale": 0.0}, ValueError, "`loss_scale` must be positive"),
    ("mxnet", None, {"scale_seq_len": 0}, ValueError, "`scale_seq_len` must be between 1"),
    ("mxnet", None, {"max_loss_scale": -1.0}, ValueError, "`max_loss_scale` must be positive"),
    ("chainer", None, {"interval": 0.5}, ValueError, "`interval` must be at least 1"),
    ("chainer", None, {"interval": -1}, ValueError, "`interval` must be positive"),
    ("chainer", None, {"scale": 0.0}, ValueError, "`scale` must be positive"),
    ("mindspore", "DynamicLossScaleManager", {"init_loss_scale": 0.5}, ValueError, "must be at least 1"),
    ("tf-keras", "FixedLossScale", {"loss_scale_value": 0.5}, ValueError, "must be at least 1"),
]


@pytest.mark.parametrize(("system", "rule", "config", "error", "text"), NOT_SET)
def test_preset_refuses_settings_that_the_system_refuses_or_that_cannot_work(
    system: str, rule: str | None, config: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        preset(system, rule, **config)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"hysteresis": 2**31}, r"`hysteresis` must fit int32\. Received: 2147483648\. Use one between"),
        ({"late": -(2**31)}, r"`init_clean_steps - late` must fit int32\. Received: 2147483648\."),
        ({"init_clean_steps": -(2**31), "late": 1}, r"`init_clean_steps - late` .* Received: -2147483649\."),
    ],
)
def test_counters_that_int32_cannot_hold_are_refused(settings: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        policy_from_dict(preset("deepspeed").to_dict() | settings)
