"""States written for torch, apex, DeepSpeed, Megatron and fairseq."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stories import next_of

from gradscale.peers import export_state, import_state, preset
from gradscale.policies.contract import Policy, ScaleState, Seen
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling, Static

FLAGS = st.lists(st.booleans(), max_size=60)


def run(policy: Policy, flags: list[bool], state: Any = None) -> Any:
    state = policy.start() if state is None else state
    for overflow in flags:
        state = next_of(policy, state, Seen(finite=np.bool_(not overflow)))
    return state


def moving_parts(state: ScaleState) -> tuple[float, int, int]:
    return float(state.scale), int(state.clean_steps), int(state.credits)


ROUND_TRIPS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("torch", None, {"growth_interval": 3}),
    ("torch", None, {"init_scale": 100.0, "growth_factor": 1.5, "backoff_factor": 0.8, "growth_interval": 2}),
    ("apex", "amp.LossScaler", {}),
    ("apex", "contrib.FP16_Optimizer", {"scale_window": 4, "scale_factor": 3.0}),
    ("deepspeed", "fused_optimizer._update_scale", {"scale_window": 3, "init_scale": 2.0**16}),
    ("deepspeed", "fused_optimizer._update_scale", {"scale_window": 2, "delayed_shift": 2}),
    ("megatron", None, {}),
]


@pytest.mark.parametrize(("system", "variant", "config"), ROUND_TRIPS)
@given(flags=FLAGS)
def test_import_of_an_export_is_the_same_policy_and_state(
    system: str, variant: str | None, config: dict[str, Any], flags: list[bool]
) -> None:
    policy: Any = preset(system, variant, **config)
    state = run(policy, flags)
    imported: Any
    imported, read = import_state(system, export_state(system, policy, state))
    assert moving_parts(read) == moving_parts(state)
    assert replace(imported, init_scale=policy.init_scale) == policy
    assert moving_parts(run(imported, flags, read)) == moving_parts(run(policy, flags, state))


@pytest.mark.parametrize("system", ["torch", "apex", "deepspeed"])
def test_static_scales_come_back_as_static(system: str) -> None:
    policy = Static(128.0)
    assert import_state(system, export_state(system, policy, run(policy, [False, True])))[0] == policy


def test_fairseq_keeps_the_scale_alone() -> None:
    policy = preset("fairseq", scale_window=2)
    state = run(policy, [False, False, False])
    assert export_state("fairseq", policy, state) == {"loss_scale": 65536.0}
    assert float(import_state("fairseq", {"loss_scale": 65536.0})[1].scale) == 65536.0


def test_exports_are_plain_values_of_the_right_types() -> None:
    policy = Dynamic(growth_interval=5)
    state = run(policy, [False, True, False])
    assert export_state("torch", policy, state) == {
        "scale": 32768.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 5,
        "_growth_tracker": 1,
    }
    assert export_state("apex", policy, state) == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}
    megatron = export_state("megatron", policy, state)
    assert (megatron["scale"].shape, megatron["scale"].dtype) == ((1,), np.float32)
    assert export_state("torch", NoScaling(), NoScaling().start()) == {}


def test_deepspeed_iterations_count_every_step() -> None:
    policy = preset("deepspeed", "fused_optimizer._update_scale", scale_window=10)
    exported = export_state("deepspeed", policy, run(policy, [False, True, False, False, False]))
    assert (exported["cur_iter"], exported["last_overflow_iter"]) == (5, 1)


def scaler_of_torch(saved: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch")
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    scaler.load_state_dict(saved)
    scaler.scale(torch.ones(()))
    return scaler


def update(scaler: Any, overflow: bool) -> None:
    """Makes torch's scaler see a step, as `unscale_` would report it."""
    torch = pytest.importorskip("torch")
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(float(overflow))}
    scaler.update()


@pytest.mark.parametrize(
    "policy",
    [
        preset("torch", init_scale=2.0**20, growth_interval=3),
        preset("torch", init_scale=7e4, growth_factor=1.7, backoff_factor=0.6, growth_interval=4),
        Dynamic(init_scale=2.0**40, growth_interval=5, growth_factor=4.0),
        Static(512.0),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_real_grad_scaler_loads_the_export_and_both_continue_equally(policy: Any) -> None:
    flags = np.random.default_rng(7).random(90) < 0.25
    state = run(policy, list(flags[:40]))
    scaler = scaler_of_torch(export_state("torch", policy, state))
    for overflow in flags[40:]:
        assert scaler.get_scale() == float(state.scale)
        update(scaler, bool(overflow))
        state = run(policy, [bool(overflow)], state)
    assert scaler.get_scale() == float(state.scale)


def test_what_a_real_grad_scaler_saves_is_imported_and_both_continue_equally() -> None:
    scaler = scaler_of_torch(export_state("torch", policy := preset("torch", growth_interval=3), policy.start()))
    flags = np.random.default_rng(8).random(90) < 0.25
    for overflow in flags[:40]:
        update(scaler, bool(overflow))
    policy, state = import_state("torch", scaler.state_dict())
    for overflow in flags[40:]:
        update(scaler, bool(overflow))
        state = run(policy, [bool(overflow)], state)
        assert scaler.get_scale() == float(state.scale)


INEXPRESSIBLE: list[tuple[str, Policy, str]] = [
    (
        "torch",
        Dynamic(hysteresis=2),
        "torch's GradScaler has hysteresis=1 and no setting for it. Received: hysteresis=2",
    ),
    ("torch", Dynamic(min_scale=4.0), "min_scale=0.0 and no setting for it. Received: min_scale=4.0"),
    ("torch", Dynamic(max_scale=2.0**20), "max_scale=inf and no setting for it. Received: max_scale=1048576.0"),
    ("torch", preset("deepspeed"), "uncounted clean steps=0 and no setting"),
    ("torch", preset("fairseq"), "torch's GradScaler can continue from `Dynamic`.*Received: FairseqScaler"),
    ("apex", Dynamic(growth_factor=4.0), "apex amp has growth_factor=2.0 and no setting"),
    ("apex", Dynamic(hysteresis=3), "apex amp has hysteresis=1 and no setting"),
    ("apex", NoScaling(), "apex amp can continue from `Dynamic`.*Received: NoScaling"),
    ("apex", preset("apex", "update_scale_hysteresis"), "contrib FP16_Optimizer has min_scale=1.0 and no setting"),
    ("deepspeed", Dynamic(), "DeepSpeed's FP16 optimizer has uncounted clean steps=1"),
    ("deepspeed", NoScaling(), "Received: NoScaling"),
    ("deepspeed", replace(preset("deepspeed"), growth_factor=3.0), "grows and backs off by one factor"),  # pyright: ignore
    ("megatron", Static(2.0), "Megatron's DynamicGradScaler can continue from `Dynamic`.*Received: Static"),
    ("megatron", Dynamic(growth_factor=3.0), "Megatron's DynamicGradScaler has growth_factor=2.0"),
    ("megatron", Dynamic(hysteresis=2, refill="clean"), "has refill='growth' and no setting"),
    ("fairseq", Dynamic(hysteresis=2), "fairseq's DynamicLossScaler has hysteresis=1"),
    ("fairseq", Static(2.0), "Received: Static"),
]


@pytest.mark.parametrize(("system", "policy", "message"), INEXPRESSIBLE)
def test_what_a_system_cannot_follow_is_refused(system: str, policy: Policy, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        export_state(system, policy, policy.start())


def test_bounds_that_dynamic_has_by_default_are_dropped() -> None:
    assert export_state("torch", Dynamic(), Dynamic().start())["scale"] == 65536.0


def test_a_state_of_many_scales_is_refused() -> None:
    state = ScaleState(scale=np.ones(3, np.float32))
    with pytest.raises(TypeError, match="`scale` of the state to export must be a number"):
        export_state("torch", Dynamic(), state)


def test_something_that_is_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`state` must be a ScaleState. Received: 3"):
        export_state("torch", Dynamic(), 3)  # pyright: ignore[reportArgumentType]
