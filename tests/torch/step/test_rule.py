"""The rule on torch's tensors against the same rule on numpy's, step by step and bit-exact."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.peers.rows import assert_scales, assert_scales_within_error, correctly_rounded, rows

from gradscale import Dynamic, NoScaling, Policy, Seen, Static, preset
from gradscale.engine.host import decide_on_host
from gradscale.policies.contract import backed_off
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.record import place
from gradscale.torch.step.decide import Rule

pytestmark = [pytest.mark.usefixtures("either_way"), pytest.mark.cpu_only("the rule alone, on numbers of the CPU")]

POLICIES: dict[str, Policy] = {
    "Dynamic": Dynamic(growth_interval=3),
    "Dynamic, hysteresis": Dynamic(init_scale=8.0, growth_interval=2, hysteresis=3, refill="clean", max_scale=64.0),
    "Dynamic, odd factors": Dynamic(init_scale=300.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2),
    "Dynamic, at the ends": Dynamic(
        init_scale=2.0**126, min_scale=2.0**-126, growth_interval=1, backoff_factor=2.0**-60
    ),
    "Headroom": Headroom(),
    "Headroom, quick": Headroom(leak=0.1, recovery=0.05, margin_bits=0, max_scale=2.0**40),
    "LogMax": LogMax(),
    "Histogram": Histogram(period=2),
    "Static": Static(100.0),
    "NoScaling": NoScaling(),
    "torch": preset("torch", growth_interval=2),
    "torch, odd factors": preset("torch", growth_factor=1.7, backoff_factor=0.3, growth_interval=2),
    "deepspeed": preset("deepspeed", scale_window=2, delayed_shift=2),
    "megatron": preset("megatron", growth_interval=2, hysteresis=2),
    "popart": preset("popart"),
}

EVENTS = st.tuples(
    st.sampled_from(["clean", "clean", "clean", "inf", "bad loss", "both"]),
    st.one_of(st.just(0.0), st.floats(2.0**-140, 2.0**120, width=32)),
    st.floats(0, 1, width=32),
)


def seen_by(event: tuple[str, float, float], scalar: Any) -> Seen:
    kind, amax, share = event
    return Seen(
        finite=scalar(kind in ("clean", "bad loss"), "bool"),
        loss_finite=scalar(kind not in ("bad loss", "both"), "bool"),
        amax=scalar(amax, "float32"),
        norm=scalar(amax, "float32"),
        upper_share=scalar(share, "float32"),
    )


def in_numpy(value: Any, dtype: str) -> Any:
    return np.dtype(dtype).type(value)


def in_torch(value: Any, dtype: str) -> Any:
    return torch.tensor(value, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(events=st.lists(EVENTS, min_size=1, max_size=30))
@example(events=[("inf", 0.0, 0.0)] * 3 + [("bad loss", 0.0, 0.0)])  # the scale is 2**-54 by then, and stays the same
def test_states_and_gates_are_the_same_to_the_last_bit(name: str, events: list[tuple[str, float, float]]) -> None:
    policy = POLICIES[name]
    rule, state = Rule(policy, device=torch.device("cpu")), policy.start()
    for event in events:
        found = rule.decide(rule.leaves(seen_by(event, in_torch)), rule.scale, 1.0)
        expected = decide_on_host(policy, state, seen_by(event, in_numpy), 1.0)
        rule.state, state = found.state, expected.state
        assert rule.state.to_dict() == state.to_dict()
        assert bool(found.applied) == bool(expected.applied)
        assert float(found.factor) == float(np.float32(expected.factor))


ROWS = rows("peer_scale_sequences.json")


def scales_on_torch(row: dict[str, Any]) -> list[float]:
    """Returns the scales of a recorded run of another system, as its preset has them on torch."""
    rule = Rule(preset(row["system"], row["class"], **row["config"]), device=torch.device("cpu"))
    scales: list[float] = []
    amaxes = row.get("amax") or [0.0] * len(row["found_inf"])
    for found_inf, amax in zip(row["found_inf"], amaxes, strict=True):
        event = ("inf" if found_inf else "clean", amax, float(found_inf))
        # The rule itself: a run keeps its scale where gradients can be divided by it.
        with np.errstate(all="ignore"):
            rule.state = rule.policy.next(rule.state, rule.leaves(seen_by(event, in_torch)), rule.xp)
        scales.append(float(rule.state.scale))
    return scales


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_preset_gives_the_scales_of_its_peer_on_torch(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    correctly_rounded(monkeypatch, torch)
    assert_scales(row, scales_on_torch(row))


@pytest.mark.parametrize("row", [row for row in ROWS if row["class"] == "LogMaxScaler"], ids=lambda row: row["id"])
def test_log_max_gives_the_scales_of_its_peer_within_the_error_of_the_functions_of_torch(row: dict[str, Any]) -> None:
    assert_scales_within_error(row, preset(row["system"], row["class"], **row["config"]), scales_on_torch(row))


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("Static", "NoScaling")])
def test_a_forced_backoff_is_the_same_to_the_last_bit(name: str) -> None:
    policy = POLICIES[name]
    # Vectors of one element: numpy 1 makes float64 of a float32 scalar times a Python number.
    rule, state = Rule(policy, device=torch.device("cpu")), place(policy.start(), np.atleast_1d)
    for _ in range(4):
        rule.state = rule.lowered(rule.state)
        state = backed_off(policy, state, Seen(finite=np.zeros(1, bool)), np)  # type: ignore[arg-type]
        assert rule.state.to_dict() == place(state, lambda value: value[0]).to_dict()
