"""States of torch, apex, DeepSpeed, Megatron and fairseq: read, and continued where the system would have gone on."""

from argparse import Namespace
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers import oracles
from tests.stories import next_of

from gradscale.peers import import_state, preset
from gradscale.peers.fairseq import FairseqScaler
from gradscale.policies.contract import ScaleState, Seen
from gradscale.policies.static import NoScaling, Static

FLAGS = st.lists(st.booleans(), max_size=40)
TORCH = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 7}
CONTRIB = {
    "dynamic_loss_scale": True,
    "cur_scale": 512,
    "cur_iter": 12,
    "last_overflow_iter": 4,
    "scale_factor": 2,
    "scale_window": 5,
    "optimizer_state_dict": {},
    "fp32_groups": [],
}
MEGATRON = {"scale": np.asarray([8.0], np.float32), "growth_tracker": 3, "hysteresis_tracker": -2}


def run(policy: Any, state: Any, flags: list[bool]) -> Any:
    for overflow in flags:
        state = next_of(policy, state, Seen(finite=np.bool_(not overflow)))
    return state


def assert_continues(imported: tuple[Any, Any], oracle: Any, flags: list[bool]) -> None:
    """Steps the imported state and the system's own rule side by side, from where the import left them."""
    policy, state = imported
    assert float(state.scale) == float(oracle.scale)
    for overflow in flags:
        state = run(policy, state, [overflow])
        oracle.step(overflow)
        assert float(state.scale) == float(oracle.scale)


def stepped(oracle: Any, flags: list[bool]) -> Any:
    for overflow in flags:
        oracle.step(overflow)
    return oracle


@given(FLAGS, FLAGS)
def test_torch_goes_on_where_it_stopped(before: list[bool], after: list[bool]) -> None:
    settings = {"growth_factor": 1.5, "backoff_factor": 0.8, "growth_interval": 3}
    policy = preset("torch", init_scale=100.0, **settings)
    state = run(policy, policy.start(), before)
    saved = {"scale": float(state.scale), **settings, "_growth_tracker": int(state.clean_steps)}
    imported, resumed = import_state("torch", saved)
    assert run(imported, resumed, after).scale == run(policy, state, after).scale


@given(FLAGS, FLAGS)
def test_apex_amp_goes_on_where_it_stopped(before: list[bool], after: list[bool]) -> None:
    config = {"init_scale": 2.0**16, "scale_window": 2000, "min_loss_scale": None, "max_loss_scale": 2.0**24}
    oracle = stepped(oracles.ApexAmp(**config), [False] * 1990 + before)
    saved = OrderedDict(loss_scaler0={"loss_scale": oracle.scale, "unskipped": oracle.tracker})
    assert_continues(import_state("apex", saved), oracle, after)


@given(FLAGS, FLAGS, st.integers(1, 5))
def test_apex_contrib_goes_on_where_it_stopped(before: list[bool], after: list[bool], window: int) -> None:
    oracle = stepped(oracles.ApexModulo(2**16, 2, window), before)
    counters = {"cur_iter": oracle.iteration, "last_overflow_iter": oracle.last_overflow}
    saved = CONTRIB | counters | {"cur_scale": oracle.scale, "scale_window": window}
    assert_continues(import_state("apex", saved), oracle, after)


@given(FLAGS, FLAGS, st.integers(1, 5))
def test_deepspeed_without_zero_goes_on_where_it_stopped(before: list[bool], after: list[bool], window: int) -> None:
    oracle = stepped(oracles.DeepSpeed(2**16, window, 1), before)
    counters = {"cur_iter": oracle.iteration, "last_overflow_iter": oracle.last_overflow}
    saved = CONTRIB | counters | {"cur_scale": oracle.scale, "scale_window": window}
    assert_continues(import_state("deepspeed", {"optimizer": saved}), oracle, after)


@given(FLAGS, FLAGS, st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_deepspeed_zero_goes_on_where_it_stopped(
    before: list[bool], after: list[bool], window: int, patience: int, consecutive: bool
) -> None:
    config = {"min_scale": 0.5, "delayed_shift": patience, "consecutive_hysteresis": consecutive}
    oracle = stepped(oracles.DeepSpeed(2.0**16, window, **config), before)
    scaler = Namespace(
        cur_scale=oracle.scale,
        cur_iter=oracle.iteration,
        last_overflow_iter=oracle.last_overflow,
        scale_factor=2.0,
        scale_window=window,
        cur_hysteresis=oracle.credits,
        raise_error_at_min_scale=False,
        dynamic=True,
        dtype="torch.float16",
        **config,
    )
    saved = {"optimizer_state_dict": {"loss_scaler": scaler, "zero_stage": 2, "overflow": False}}
    assert_continues(import_state("deepspeed", saved), oracle, after)


@given(FLAGS, FLAGS)
def test_megatron_goes_on_where_it_stopped(before: list[bool], after: list[bool]) -> None:
    config = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4, "hysteresis": 3, "min_scale": 2.0}
    oracle = stepped(oracles.Float32Credits(2.0**16, config, kernel=False), before)
    scaler = {
        "scale": np.asarray([oracle.scale]),
        "growth_tracker": oracle.tracker,
        "hysteresis_tracker": oracle.credits,
    }
    args = Namespace(loss_scale=None, loss_scale_window=4.0, hysteresis=3, min_loss_scale=2.0, lr=0.1)
    checkpoint = {"optimizer": {"optimizer": {}, "grad_scaler": scaler}, "args": args}
    assert_continues(import_state("megatron", checkpoint), oracle, after)


@given(FLAGS, FLAGS)
def test_fairseq_goes_on_as_fairseq_itself_resumes(before: list[bool], after: list[bool]) -> None:
    config = {"init_scale": 128.0, "scale_factor": 2.0, "scale_window": 2, "tolerance": 0.25, "threshold": 1.0}
    oracle = stepped(oracles.Fairseq(**config, min_loss_scale=1e-4), before)
    common = {"fp16_scale_window": 2, "fp16_scale_tolerance": 0.25, "threshold_loss_scale": 1.0, "seed": 1}
    checkpoint = {"last_optimizer_state": {"loss_scale": oracle.scale, "state": {}}, "cfg": {"common": common}}
    resumed = oracles.Fairseq(**config | {"init_scale": oracle.scale}, min_loss_scale=1e-4)
    assert_continues(import_state("fairseq", checkpoint), resumed, after)


@pytest.mark.parametrize("key", ["MixedPrecision", "FSDPPrecision", "native_amp_scaling_state"])
def test_lightning_checkpoints_hold_the_dict_of_torch(key: str) -> None:
    checkpoint = {"state_dict": {}, "epoch": 3, key: TORCH}
    assert import_state("lightning", checkpoint) == import_state("torch", TORCH)


def test_very_old_lightning_checkpoints_hold_the_dict_of_apex() -> None:
    amp = {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 5}}
    assert import_state("torch", {"epoch": 1, "amp_scaling_state": amp}) == import_state("apex", amp)


@pytest.mark.parametrize("saved", [{}, {"epoch": 3, "MixedPrecision": {}}], ids=["alone", "in a checkpoint"])
def test_empty_dict_of_a_disabled_torch_scaler_is_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"scaler that was disabled.*Received: an empty dict.*`NoScaling\(\)`"):
        import_state("torch", saved)


def test_lightning_checkpoint_without_a_scaler_says_where_it_would_be() -> None:
    with pytest.raises(ValueError, match=r"Lightning.*'MixedPrecision'.*Received keys: \['epoch', 'state_dict'\]"):
        import_state("lightning", {"state_dict": {}, "epoch": 3})


def test_apex_checkpoint_says_which_part_to_pass() -> None:
    with pytest.raises(ValueError, match=r"Pass `checkpoint\['amp'\]`"):
        import_state("apex", {"model": {}, "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 5}}})


def test_path_instead_of_bytes_says_how_to_read_it() -> None:
    with pytest.raises(TypeError, match=r"`Path\(path\)\.read_bytes\(\)`"):
        import_state("deepspeed", "checkpoint.pt")  # pyright: ignore[reportArgumentType]


def test_values_may_be_arrays_and_tensors_of_one_element() -> None:
    torch = pytest.importorskip("torch")
    numbers = {"scale": np.float32(1024), "growth_factor": np.asarray([2.0]), "backoff_factor": torch.tensor(0.5)}
    counts = {"growth_interval": np.int64(10), "_growth_tracker": torch.tensor([7], dtype=torch.int32)}
    assert import_state("torch", numbers | counts) == import_state("torch", TORCH)


def test_torch_factors_of_one_are_a_static_scale() -> None:
    saved = TORCH | {"growth_factor": 1.0, "backoff_factor": 1.0}
    assert import_state("torch", saved) == (Static(1024.0), ScaleState(scale=np.float32(1024)))


def test_scales_that_ran_into_the_ends_are_read_as_they_are() -> None:
    assert import_state("torch", TORCH | {"scale": 0.0})[1].scale == 0
    assert import_state("megatron", MEGATRON | {"scale": float("inf")})[1].scale == np.inf


def test_apex_amp_object_brings_its_settings() -> None:
    attributes = {"_loss_scale": 32.0, "dynamic": True, "_max_loss_scale": 64.0, "_min_loss_scale": None}
    scaler = Namespace(**attributes, _scale_seq_len=9, _unskipped=4, _has_overflow=False, _overflow_buf=object())
    policy, state = import_state("apex", {"loss_scaler": scaler, "dynamic_loss_scale": True})
    assert policy == preset("apex", init_scale=32.0, scale_window=9, max_loss_scale=64.0)
    assert (float(state.scale), int(state.clean_steps)) == (32.0, 4)


def test_static_scalers_are_read_as_static() -> None:
    static = {"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 9}
    amp = Namespace(_loss_scale=128.0, dynamic=False)
    for system, saved in [
        ("apex", static),
        ("apex", {"loss_scaler": amp}),
        ("apex", {"loss_scaler": Namespace(cur_scale=128.0)}),
        ("deepspeed", {"optimizer": static}),
        ("deepspeed", {"loss_scaler": Namespace(cur_scale=128.0, dynamic=False)}),
        ("megatron", {"optimizer": {"grad_scaler": {}}, "args": Namespace(loss_scale=128.0)}),
    ]:
        assert import_state(system, saved)[0] == Static(128.0)


def test_older_apex_objects_count_iterations() -> None:
    counters = {"cur_iter": 12, "last_overflow_iter": 4, "scale_factor": 2.0, "scale_window": 5}
    policy, state = import_state("apex", {"loss_scaler": Namespace(cur_scale=512.0, **counters)})
    assert policy == preset("apex", "fp16_utils.DynamicLossScaler", init_scale=512.0, scale_window=5)
    assert int(state.clean_steps) == (12 - 4 - 1) % 5


def test_deepspeed_bf16_has_no_scale() -> None:
    assert import_state("deepspeed", {"optimizer": {"fp32_groups_flat": [], "clip_grad": 1.0}})[0] == NoScaling()


def test_deepspeed_versions_with_hysteresis_bring_their_credits() -> None:
    policy, state = import_state("deepspeed", CONTRIB | {"cur_hysteresis": 1})
    assert policy == preset(
        "deepspeed", "fused_optimizer._update_scale", init_scale=512, scale_window=5, delayed_shift=2
    )
    assert int(state.credits) == 1


def test_chained_megatron_optimizers_that_agree_are_one() -> None:
    optimizer = {"grad_scaler": MEGATRON, "fp32_from_fp16_params": []}
    assert import_state("megatron", [optimizer, optimizer]) == import_state("megatron", MEGATRON)
    assert import_state("megatron", {"optimizer": [optimizer]}) == import_state("megatron", optimizer)


def test_fairseq_without_settings_gets_those_of_its_class() -> None:
    assert import_state("fairseq", {"loss_scale": 2.0})[0] == FairseqScaler()


def test_older_fairseq_checkpoints_have_flat_settings() -> None:
    checkpoint = {"args": Namespace(fp16_scale_window=9, lr=[1]), "last_optimizer_state": {"loss_scale": 2.0}}
    assert import_state("fairseq", checkpoint)[0] == FairseqScaler(init_scale=128.0, scale_window=9)


DAMAGED: list[tuple[str, Any, str]] = [
    ("torch", {k: v for k, v in TORCH.items() if k != "scale"}, r"torch's GradScaler saves.*missing: \['scale'\]"),
    ("torch", TORCH | {"lr": 1}, r"unknown: \['lr'\]"),
    ("torch", TORCH | {"scale": float("nan")}, "`scale` of torch's GradScaler must not be NaN"),
    ("torch", TORCH | {"scale": -1.0}, "`scale` of .* must not be negative"),
    ("torch", TORCH | {"scale": "1024"}, "`scale` of .* must be a number. Received: '1024'"),
    ("torch", TORCH | {"scale": np.ones(2)}, "`scale` of .* must be a number. Received: array"),
    ("torch", TORCH | {"scale": True}, "`scale` of .* must be a number. Received: True"),
    ("torch", TORCH | {"scale": 1e39}, "`scale` of .* must fit a float32 tensor"),
    ("torch", TORCH | {"scale": 10**400}, "`scale` of .* must fit a float"),
    ("torch", TORCH | {"growth_factor": 0.0}, "`growth_factor` of .* must be positive and finite"),
    ("torch", TORCH | {"growth_interval": 10.0}, "`growth_interval` of .* must be an integer"),
    ("torch", TORCH | {"_growth_tracker": -1}, "`_growth_tracker` of .* must lie between 0"),
    ("torch", TORCH | {"_growth_tracker": 2**31}, r"`_growth_tracker` of .* must lie between 0 and 2\*\*31 - 1"),
    ("torch", 3, "`import_state` takes the mapping.*Received: int"),
    ("torch", None, "`import_state` takes the mapping.*Received: NoneType"),
    ("apex", {}, "apex amp saves the keys loss_scale, unskipped"),
    ("apex", {"loss_scaler0": 3}, "apex amp saves a mapping. Received: 3"),
    ("apex", {"loss_scaler0": {}, "loss_scaler1": {}}, r"one scaler for each loss.*mapping\['loss_scaler1'\]"),
    ("apex", {"loss_scaler": 3}, "`loss_scaler` must be the scaler object"),
    ("apex", CONTRIB | {"cur_iter": 4}, "`last_overflow_iter` of .* must come before `cur_iter`"),
    ("apex", CONTRIB | {"scale_window": 0}, "`scale_window` of .* must lie between 1"),
    ("apex", CONTRIB | {"dynamic_loss_scale": 1}, "`dynamic_loss_scale` of .* must be a bool"),
    ("deepspeed", {"module": {}}, r"A DeepSpeed checkpoint of an FP16 run.*Received keys: \['module'\]"),
    ("deepspeed", {"loss_scaler": Namespace(scale_window=5)}, "DeepSpeed's loss scaler saves the key 'min_scale'"),
    ("megatron", {"grad_scaler": {}}, "Megatron saves nothing of a constant scale"),
    ("megatron", {"grad_scaler": 5}, "Megatron's DynamicGradScaler saves a mapping. Received: 5"),
    ("megatron", {"optimizer": {"state": {}}}, r"saves a `grad_scaler`. Received: \['state'\]"),
    ("megatron", [], "at least one. Received: an empty list"),
    ("megatron", [3], "saves a `grad_scaler`. Received: 3"),
    ("megatron", [{"grad_scaler": MEGATRON}, {"grad_scaler": MEGATRON | {"scale": 4.0}}], r"scales \[8.0, 4.0\]"),
    ("fairseq", {"last_optimizer_state": {}}, "A fairseq checkpoint of an FP16 run holds `loss_scale`"),
]


@pytest.mark.parametrize(("system", "saved", "message"), DAMAGED)
def test_what_a_system_did_not_write_is_refused(system: str, saved: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        import_state(system, saved)


def test_a_checkpoint_that_holds_itself_is_refused_not_followed_for_ever() -> None:
    checkpoint: dict[str, Any] = {}
    checkpoint["optimizer"] = checkpoint["optimizer_state_dict"] = checkpoint
    for system in ("deepspeed", "megatron", "fairseq", "torch"):
        with pytest.raises(ValueError, match=r"saves|holds"):
            import_state(system, checkpoint)
