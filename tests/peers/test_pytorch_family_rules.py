"""Presets of torch, apex, DeepSpeed, Megatron and fairseq against plain transcriptions, and torch against itself."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.peers import oracles
from tests.stories import next_of

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.contract import Policy, Seen
from gradscale.policies.static import NoScaling, Static
from gradscale.record import numbers, place

FLAGS = st.lists(st.booleans(), min_size=1, max_size=80)
SCALES = st.one_of(st.sampled_from([1e-3, 1.0, 16.0, 100.0, 65536.0, 2.0**32, 1e36, 3e38]), st.floats(1.0, 1e5))
WINDOWS = st.integers(1, 6)
FACTORS = st.sampled_from([2.0, 1.5, 3.0, 1.1])
GROWTHS = st.sampled_from([2.0, 1.5, 3.3, 16.0])
BACKOFFS = st.sampled_from([0.5, 0.8, 0.3, 0.25])


def advanced(policy: Policy, state: Any, overflow: bool) -> Any:
    return next_of(policy, state, Seen(finite=np.bool_(not overflow)))


def assert_same_run(policy: Policy, oracle: Any, flags: list[bool]) -> None:
    """Steps both over `flags`; scale, trackers and credits must agree after each, and the state be stuck at a stop."""
    state = policy.start()
    for step, overflow in enumerate(flags):
        state = advanced(policy, state, overflow)
        try:
            oracle.step(overflow)
        except oracles.Stopped:
            assert bool(state.stuck), f"step {step}"
            if isinstance(oracle, oracles.DeepSpeed):
                return  # DeepSpeed's counters are left half updated; the run is over
        assert float(state.scale) == float(oracle.scale), f"step {step}"
        assert int(state.clean_steps) == getattr(oracle, "tracker", int(state.clean_steps)), f"step {step}"
        assert int(state.credits) == getattr(oracle, "credits", int(state.credits)), f"step {step}"


@given(
    FLAGS,
    st.fixed_dictionaries(
        {
            "init_scale": SCALES,
            "scale_window": WINDOWS,
            "min_scale": st.sampled_from([0, 0.25, 1, 2.0, 3.0, 64]),
            "delayed_shift": st.integers(1, 4),
            "consecutive_hysteresis": st.booleans(),
            "raise_error_at_min_scale": st.booleans(),
        }
    ),
)
def test_deepspeed_zero_follows_its_rule(flags: list[bool], config: dict[str, Any]) -> None:
    assert_same_run(preset("deepspeed", "DynamicLossScaler", **config), oracles.DeepSpeed(**config), flags)


@pytest.mark.parametrize("variant", ["fused_optimizer._update_scale", "unfused_optimizer._update_scale"])
@given(flags=FLAGS, scale=SCALES, window=WINDOWS, lowest=st.sampled_from([0.25, 1, 2.0, 3.0]))
def test_deepspeed_without_zero_follows_its_rule(
    variant: str, flags: list[bool], scale: float, window: int, lowest: float
) -> None:
    config = {"init_scale": scale, "scale_window": window, "min_scale": lowest}
    assert_same_run(preset("deepspeed", variant, **config), oracles.DeepSpeed(**config), flags)


@given(
    FLAGS,
    st.fixed_dictionaries(
        {
            "init_scale": SCALES,
            "scale_factor": FACTORS,
            "scale_window": WINDOWS,
            "tolerance": st.sampled_from([0, 0.05, 0.1, 0.25, 0.5, 1.0, 2]),
            "threshold": st.sampled_from([None, 0.01, 0.5, 1]),
            "min_loss_scale": st.sampled_from([0, 1e-4, 0.1, 1]),
        }
    ),
)
def test_fairseq_follows_its_rule_even_after_a_stop(flags: list[bool], config: dict[str, Any]) -> None:
    assert_same_run(preset("fairseq", **config), oracles.Fairseq(**config), flags)


STOPPED = {"init_scale": 1.0, "scale_factor": 2.0, "scale_window": 3, "threshold": None, "min_loss_scale": 0.6}


def test_fairseq_counts_the_stopped_iteration_neither_as_step_nor_as_overflow() -> None:
    flags = [True, False, False, False, False]
    policy = preset("fairseq", tolerance=0.0, **STOPPED)
    assert_same_run(policy, oracles.Fairseq(tolerance=0.0, **STOPPED), flags)
    state = advanced(policy, advanced(policy, policy.start(), True), False)
    assert float(state.scale) == 2.0  # zero iterations since the overflow are a whole number of windows


def test_fairseq_tolerates_an_overflow_right_after_a_stop() -> None:
    policy = preset("fairseq", tolerance=0.5, **STOPPED)
    assert_same_run(policy, oracles.Fairseq(tolerance=0.5, **STOPPED), [True, True, True, True, False, True])
    state = advanced(policy, advanced(policy, policy.start(), True), True)
    assert (float(state.scale), bool(state.stuck)) == (1.0, False)


def test_fairseq_is_stuck_at_its_threshold() -> None:
    policy = preset("fairseq", init_scale=4.0, threshold=2.0)
    first = advanced(policy, policy.start(), True)
    second = advanced(policy, first, True)
    assert (float(first.scale), bool(first.stuck)) == (2.0, False)
    assert (float(second.scale), bool(second.stuck)) == (2.0, True)


@given(
    FLAGS,
    st.fixed_dictionaries(
        {
            "init_scale": SCALES,
            "scale_window": WINDOWS,
            "min_loss_scale": st.sampled_from([None, 0, 0.1, 1.0, 3.0]),
            "max_loss_scale": st.sampled_from([2.0**24, 1e5, 3e30]),
        }
    ),
)
def test_apex_amp_follows_its_rule(flags: list[bool], config: dict[str, Any]) -> None:
    assert_same_run(preset("apex", **config), oracles.ApexAmp(**config), flags)


@pytest.mark.parametrize("variant", ["fp16_utils.DynamicLossScaler", "contrib.FP16_Optimizer"])
@given(flags=FLAGS, scale=SCALES, factor=FACTORS, window=WINDOWS)
def test_apex_modulo_scalers_follow_their_rule(
    variant: str, flags: list[bool], scale: float, factor: float, window: int
) -> None:
    config = {"init_scale": scale, "scale_factor": factor, "scale_window": window}
    assert_same_run(preset("apex", variant, **config), oracles.ApexModulo(**config), flags)


@given(FLAGS, SCALES, GROWTHS, BACKOFFS, WINDOWS, st.integers(1, 4))
def test_apex_hysteresis_kernel_follows_its_rule(
    flags: list[bool], scale: float, growth: float, backoff: float, window: int, hysteresis: int
) -> None:
    config: dict[str, Any] = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": window}
    config["hysteresis"] = hysteresis
    policy = preset("apex", "update_scale_hysteresis", init_scale=scale, **config)
    assert_same_run(policy, oracles.Float32Credits(scale, config, kernel=True), flags)


@given(FLAGS, SCALES, GROWTHS, BACKOFFS, WINDOWS, st.integers(1, 4), st.sampled_from([1e-4, 1e-3]))
def test_megatron_follows_its_rule(
    flags: list[bool], scale: float, growth: float, backoff: float, window: int, hysteresis: int, lowest: float
) -> None:
    config: dict[str, Any] = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": window}
    config |= {"hysteresis": hysteresis, "min_scale": lowest}
    policy = preset("megatron", initial_scale=scale, **config)
    assert_same_run(policy, oracles.Float32Credits(scale, config, kernel=False), flags)


class TorchKernel:
    """torch's own kernel, on tensors of torch's own making."""

    def __init__(self, init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
        self.torch = pytest.importorskip("torch")
        self._scale = self.torch.full((), init_scale, dtype=self.torch.float32)
        self._tracker = self.torch.zeros((), dtype=self.torch.int32)
        self.settings = (growth_factor, backoff_factor, growth_interval)

    def step(self, overflow: bool) -> None:
        found_inf = self.torch.tensor(float(overflow))
        self.torch._amp_update_scale_(self._scale, self._tracker, found_inf, *self.settings)

    @property
    def scale(self) -> float:
        return self._scale.item()

    @property
    def tracker(self) -> int:
        return self._tracker.item()


@given(FLAGS, SCALES, st.floats(1.01, 20.0), st.floats(0.01, 0.99), WINDOWS)
@settings(deadline=None)
def test_torch_preset_equals_the_kernel_of_the_installed_torch(
    flags: list[bool], scale: float, growth: float, backoff: float, window: int
) -> None:
    policy = preset("torch", init_scale=scale, growth_factor=growth, backoff_factor=backoff, growth_interval=window)
    assert_same_run(policy, TorchKernel(scale, growth, backoff, window), flags)


def test_torch_preset_falls_to_zero_and_stays_there() -> None:
    policy = preset("torch", init_scale=1e-30)
    oracle = TorchKernel(1e-30, 2.0, 0.5, 2000)
    assert_same_run(policy, oracle, [True] * 60)
    assert oracle.scale == 0


def test_sharded_scaler_equals_the_installed_one_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    sharded = pytest.importorskip("torch.distributed.fsdp.sharded_grad_scaler")
    config = {"init_scale": 100.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2}
    # Only the update runs; the constructor wants a process group.
    real = object.__new__(sharded.ShardedGradScaler)
    real._growth_factor, real._backoff_factor, real._growth_interval = 1.7, 0.3, 2
    real._scale, real._growth_tracker = torch.full((), 100.0), torch.zeros((), dtype=torch.int32)
    policy = preset("torch", "torch.distributed.fsdp.ShardedGradScaler", **config)
    state = policy.start()
    for overflow in [False] * 9 + [True, False, True, True] + [False] * 400:
        real._amp_update_scale_cpu_(torch.tensor(float(overflow)))
        state = advanced(policy, state, overflow)
        assert float(state.scale) == real._scale.item()
    assert np.isinf(state.scale)


def test_sharded_scaler_on_a_gpu_does_not_grow_to_infinity() -> None:
    policy = preset("torch", "ShardedGradScaler", device="cuda", init_scale=3e38, growth_interval=1)
    assert float(advanced(policy, policy.start(), False).scale) == np.float32(3e38)


def test_verl_is_torchs_sharded_scaler_with_an_interval_of_400() -> None:
    assert preset("verl") == preset("torch", "ShardedGradScaler", device="cuda", growth_interval=400)
    assert preset("rl", growth_interval=100) == preset("torch", growth_interval=100)
    assert preset("verl", enabled=False) == NoScaling()


def test_verl_equals_torchs_kernel_step_by_step() -> None:
    torch = pytest.importorskip("torch")
    scale, tracker = torch.full((), 65536.0), torch.zeros((), dtype=torch.int32)
    policy = preset("verl")
    state = policy.start()
    for step in range(1301):
        overflow = step in (0, 1, 500)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 400)
        state = advanced(policy, state, overflow)
        assert (float(state.scale), int(state.clean_steps)) == (scale.item(), tracker.item())
    assert float(state.scale) == 65536.0


def test_a_scaler_of_verl_is_saved_and_loaded_as_torchs() -> None:
    policy = preset("verl")
    saved = export_state("verl", policy, advanced(policy, policy.start(), False))
    assert saved == {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 400,
        "_growth_tracker": 1,
    }
    loaded, state = import_state("verl", saved)
    assert (loaded, int(state.clean_steps)) == (policy, 1)


def test_deepspeed_raises_the_scale_to_its_floor_before_it_is_stuck_there() -> None:
    policy = preset("deepspeed", init_scale=0.5, min_scale=1, delayed_shift=1)
    first = advanced(policy, policy.start(), True)
    second = advanced(policy, first, True)
    assert (float(first.scale), bool(first.stuck), bool(second.stuck)) == (1.0, False, True)


def test_numbers_for_static_scales_give_static_policies() -> None:
    assert preset("apex", loss_scale=128.0) == Static(128.0)
    assert preset("apex", "fp16_utils.LossScaler", scale=8) == Static(8)
    assert preset("apex", "contrib.FP16_Optimizer", static_loss_scale=64.0) == Static(64.0)
    assert preset("apex", "contrib.FP16_Optimizer", dynamic_loss_scale=False) == Static(1.0)
    assert preset("deepspeed", "LossScaler", scale=4.0) == Static(4.0)
    assert preset("deepspeed", "config", loss_scale=512) == Static(512)
    assert preset("megatron", "ConstantGradScaler", initial_scale=2.0) == Static(2.0)
    assert preset("megatron", "OptimizerConfig", loss_scale=32.0) == Static(32.0)


def test_disabled_scalers_give_no_scaling() -> None:
    assert preset("torch", enabled=False) == NoScaling()
    assert preset("torch", "ShardedGradScaler", enabled=False) == NoScaling()
    assert preset("deepspeed", "config", enabled=False) == NoScaling()


def test_configurations_equal_the_classes_they_set_up() -> None:
    json = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 3, "min_loss_scale": 2}
    zero = {"init_scale": 4096.0, "scale_window": 50, "delayed_shift": 3, "min_scale": 2}
    assert preset("deepspeed", "config", **json) == preset("deepspeed", **zero)
    assert preset("megatron", "OptimizerConfig", loss_scale_window=7.0) == preset("megatron", growth_interval=7)
    assert preset("fairseq", "FP16Optimizer", distributed_world_size=8, update_freq=[2]) == preset(
        "fairseq", init_scale=128.0, scale_window=1024
    )
    assert preset("fairseq", "FP16Optimizer", update_freq=2) == preset("fairseq", "FP16Optimizer", update_freq=[2])


def test_apex_amp_ignores_its_scale_factor() -> None:
    assert preset("apex", scale_factor=4.0) == preset("apex")


def test_defaults_are_those_of_each_system() -> None:
    starts = {
        ("torch", None): (2.0**16, 2000),
        ("apex", None): (2.0**16, 2000),
        ("apex", "fp16_utils.DynamicLossScaler"): (2.0**32, 1000),
        ("apex", "contrib.FP16_Optimizer"): (2.0**16, 1000),
        ("deepspeed", None): (2.0**16, 1000),
        ("deepspeed", "fused_optimizer._update_scale"): (2.0**32, 1000),
        ("megatron", None): (2.0**32, 1000),
    }
    for (system, variant), (scale, window) in starts.items():
        policy: Any = preset(system, variant)
        assert (policy.init_scale, policy.growth_interval) == (scale, window)
    fairseq: Any = preset("fairseq")
    assert (fairseq.init_scale, fairseq.scale_window) == (2.0**15, 2000)


BAD_SETTINGS: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("torch", None, {"init_scale": -1.0}, "`init_scale` must be positive and finite.*-1.0"),
    ("torch", None, {"init_scale": float("nan")}, "`init_scale` must be positive and finite.*nan"),
    ("torch", None, {"init_scale": "big"}, "`init_scale` must be a number.*'big'"),
    ("torch", None, {"init_scale": 1e39}, "`init_scale` must fit a float32 tensor"),
    ("torch", None, {"growth_factor": 1.0}, "`growth_factor` must be greater than 1"),
    ("torch", None, {"backoff_factor": 1.0}, "`backoff_factor` must be between 0 and 1"),
    ("torch", None, {"backoff_factor": 0.0}, "`backoff_factor` must be between 0 and 1"),
    ("torch", None, {"growth_interval": 0}, "`growth_interval` must be between 1"),
    ("torch", None, {"growth_interval": 2000.0}, "`growth_interval` must be an integer"),
    ("apex", None, {"loss_scale": "static"}, "`scale` must be a number.*'static'"),
    ("apex", None, {"min_loss_scale": -1.0}, "`min_loss_scale` must not be negative"),
    ("apex", None, {"scale_window": 2.5}, "`scale_window` must be an integer"),
    ("apex", "fp16_utils.DynamicLossScaler", {"scale_factor": 0}, "`scale_factor` must be greater than 1"),
    ("apex", "update_scale_hysteresis", {"hysteresis": 0}, "`hysteresis` must be between 1"),
    ("deepspeed", None, {"delayed_shift": 0}, "`delayed_shift` must be between 1"),
    ("deepspeed", None, {"min_scale": float("nan")}, "`min_scale` must not be negative or NaN"),
    ("deepspeed", "config", {"loss_scale": -2}, "`scale` must lie between"),
    ("deepspeed", "config", {"initial_scale_power": 5000}, "`initial_scale_power` must give a power of two"),
    ("deepspeed", "config", {"loss_scale": "auto"}, "`loss_scale` must be a number"),
    ("megatron", None, {"initial_scale": 1.0, "min_scale": 2.0}, "`min_scale` must not be above `initial_scale`"),
    ("megatron", None, {"hysteresis": -1}, "`hysteresis` must be between 1"),
    ("fairseq", None, {"tolerance": -0.1}, "`tolerance` must not be negative"),
    ("fairseq", None, {"scale_factor": 1}, "`scale_factor` must be greater than 1"),
    ("fairseq", "FP16Optimizer", {"update_freq": [1, 2]}, "`fp16_scale_window` must be given"),
    ("fairseq", "FP16Optimizer", {"distributed_world_size": 0}, "`distributed_world_size` must be between 1"),
]


@pytest.mark.parametrize(("system", "variant", "config", "message"), BAD_SETTINGS)
def test_settings_that_cannot_work_are_refused(
    system: str, variant: str | None, config: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        preset(system, variant, **config)


@pytest.mark.parametrize("system", ["torch", "apex", "deepspeed", "megatron", "fairseq"])
def test_presets_run_on_tensors_as_they_do_on_numbers(system: str) -> None:
    torch = pytest.importorskip("torch")

    def put(array: Any) -> Any:
        return torch.from_numpy(np.array(array))

    policy: Any = preset(system)
    state, placed, on_device = policy.start(), place(policy, put), place(policy.start(), put)
    for finite in np.random.default_rng(3).random(50) > 0.4:
        state = advanced(policy, state, not finite)
        on_device = placed.next(on_device, Seen(finite=torch.tensor(finite), loss_finite=torch.tensor(True)), torch)
        assert {name: value.item() for name, value in numbers(on_device).items()} == {
            name: value.item() for name, value in numbers(state).items()
        }
