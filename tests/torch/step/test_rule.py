"""The rule in host memory: it follows facts that are known, and catches up with those that arrive later."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradscale import Dynamic, NoScaling, Policy, Seen, Static, preset
from gradscale.engine.host import scalar, vector
from gradscale.policies.contract import ScaleState, advanced, backed_off
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.torch.host import Facts, Rule

pytestmark = pytest.mark.cpu_only("the rule alone, in host memory")

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
    "deepspeed": preset("deepspeed", scale_window=2, delayed_shift=2),
    "megatron": preset("megatron", growth_interval=2, hysteresis=2),
    "popart": preset("popart"),
}

EVENTS = st.tuples(
    st.sampled_from(["clean", "clean", "clean", "inf", "bad loss", "both"]),
    st.one_of(st.just(0.0), st.floats(2.0**-140, 2.0**120, width=32)),
    st.floats(0, 1, width=32),
)


def seen_by(event: tuple[str, float, float]) -> Seen:
    kind, amax, share = event
    return Seen(
        finite=np.bool_(kind in ("clean", "bad loss")),
        loss_finite=np.bool_(kind not in ("bad loss", "both")),
        amax=np.float32(amax),
        norm=np.float32(amax),
        upper_share=np.float32(share),
    )


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(events=st.lists(EVENTS, min_size=1, max_size=30))
@example(events=[("inf", 0.0, 0.0)] * 3 + [("bad loss", 0.0, 0.0)])  # the scale is 2**-54 by then, and stays the same
def test_states_are_those_of_the_policy_on_arrays_to_the_last_bit(
    name: str, events: list[tuple[str, float, float]]
) -> None:
    policy = POLICIES[name]
    rule, state = Rule(policy), policy.start()
    for event in events:
        rule.follow(Facts(seen_by(event)), lambda state: None)
        with np.errstate(all="ignore"):
            state = scalar(advanced(policy, vector(state), vector(seen_by(event)), np))  # type: ignore[arg-type]
        assert rule.state.to_dict() == state.to_dict()


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("Static", "NoScaling")])
def test_a_forced_backoff_is_the_same_to_the_last_bit(name: str) -> None:
    policy = POLICIES[name]
    rule, state = Rule(policy), policy.start()
    for _ in range(4):
        rule.state = rule.lowered(rule.state)
        overflow = Seen(finite=np.zeros(1, bool))
        state = scalar(backed_off(policy, vector(state), overflow, np))  # type: ignore[arg-type]
        assert rule.state.to_dict() == state.to_dict()


class Slow:
    """A host copy that arrives when the test says so, as on an accelerator that is busy."""

    def __init__(self, vector: Tensor) -> None:
        self.arrived, self._vector = False, vector

    def read(self) -> list[float]:
        return self._vector.tolist()  # type: ignore[return-value]


def later(flag: float) -> Facts:
    """Returns facts of a clean step (0), or of an overflow (1), that have not arrived."""
    copy: Any = Slow(torch.tensor([flag]))
    return Facts(copy=copy, read=lambda numbers: Seen(finite=np.bool_(not numbers[0])))


def test_facts_that_are_on_their_way_are_followed_when_the_state_is_asked_for() -> None:
    rule, states = Rule(Dynamic(init_scale=8.0)), list[ScaleState]()
    rule.follow(later(1.0), states.append)
    assert (rule.latest.scale, states) == (8.0, [])
    assert rule.state.scale == 4.0
    assert [state.scale for state in states] == [4.0]
    assert rule.state.scale == 4.0
    assert len(states) == 1


def test_facts_that_have_arrived_are_in_the_latest_state() -> None:
    rule, facts = Rule(Dynamic(init_scale=8.0)), later(1.0)
    rule.follow(facts, lambda state: None)
    assert facts.copy is not None
    facts.copy.arrived = True  # type: ignore[misc]
    assert rule.latest.scale == 4.0


def test_going_back_undoes_a_step_and_results_keep_its_outcome() -> None:
    rule, states = Rule(Dynamic(init_scale=8.0)), list[ScaleState]()
    start = rule.catch_up()
    rule.follow(later(1.0), states.append)
    rule.go_back(start)
    rule.follow(later(0.0), states.append)
    assert (rule.state.scale, rule.state.applied, rule.catch_up().steps) == (8.0, 1, 1)
    assert [state.scale for state in states] == [4.0, 8.0]


def test_an_interrupt_while_facts_are_read_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, facts = Rule(Dynamic(init_scale=8.0)), later(1.0)
    rule.follow(facts, lambda state: None)
    with monkeypatch.context() as patched:
        patched.setattr(Slow, "read", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            rule.catch_up()
    assert rule.state.scale == 4.0


def _interrupted(_: Slow) -> list[float]:
    raise KeyboardInterrupt


def test_the_scale_is_one_tensor_while_it_does_not_change() -> None:
    rule = Rule(Dynamic(init_scale=8.0, growth_interval=2), device=torch.device("cpu"))
    first = rule.scale
    rule.follow(Facts(Seen()), lambda state: None)
    assert rule.scale is first
    rule.follow(Facts(Seen()), lambda state: None)
    assert (rule.scale.item(), first.item()) == (16.0, 8.0)
