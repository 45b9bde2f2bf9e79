"""The scale of the drop-in, step by step next to the core's `Dynamic` and to torch's own rule."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.drop_in.helpers import TORCH, give, last_of, parameter, ready

from gradscale import CheckOnly, Dynamic, Headroom, Histogram, LogMax, NoScaling, Static
from gradscale.peers import preset
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE
from gradscale.policies.contract import Policy, Seen
from gradscale.torch import GradScaler
from gradscale.torch.drop_in.updates import Merged, Noted
from gradscale.torch.host import Facts

FLAGS = st.lists(st.booleans(), min_size=1, max_size=40)


def scales_of(scaler: Any, overflows: list[bool]) -> list[tuple[float, int]]:
    """Returns scale and tracker after each step of a run with the given overflows."""
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.0)
    ready(scaler)
    seen = []
    for overflow in overflows:
        give((owner, torch.inf if overflow else 1.0))
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return seen


def states_of(policy: Policy, overflows: list[bool]) -> list[tuple[float, int]]:
    """Returns the same of a policy of the core."""
    state, seen = policy.start(), []
    for overflow in overflows:
        state = policy.next(state, Seen(finite=np.bool_(not overflow)), np)  # type: ignore[arg-type]
        seen.append((float(state.scale), int(state.clean_steps)))
    return seen


@settings(max_examples=60, deadline=None)
@given(
    overflows=FLAGS,
    exponent=st.integers(-4, 20),
    growth=st.sampled_from([2.0, 4.0, 1.5, 1.1]),
    backoff=st.sampled_from([0.5, 0.25, 0.7]),
    interval=st.integers(1, 4),
)
def test_default_rule_is_torchs(
    overflows: list[bool], exponent: int, growth: float, backoff: float, interval: int
) -> None:
    config = {
        "init_scale": 2.0**exponent,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }
    found = scales_of(GradScaler("cpu", **config), overflows)
    assert found == scales_of(TORCH("cpu", **config), overflows)
    assert found == states_of(preset("torch", **config), overflows)


@settings(max_examples=60, deadline=None)
@given(
    overflows=FLAGS,
    exponent=st.integers(0, 8),
    growth=st.sampled_from([2.0, 3.0]),
    interval=st.integers(1, 3),
    hysteresis=st.integers(1, 3),
)
def test_bounded_rule_is_dynamic(
    overflows: list[bool], exponent: int, growth: float, interval: int, hysteresis: int
) -> None:
    config = {
        "init_scale": 2.0**exponent,
        "growth_factor": growth,
        "growth_interval": interval,
        "hysteresis": hysteresis,
    }
    policy = Dynamic(min_scale=1.0, max_scale=300.0, **config)
    by_arguments = GradScaler("cpu", min_scale=1.0, max_scale=300.0, **config)
    assert scales_of(by_arguments, overflows) == states_of(policy, overflows)
    assert scales_of(GradScaler("cpu", policy=policy), overflows) == states_of(policy, overflows)


@settings(max_examples=20, deadline=None)
@given(overflows=FLAGS)
def test_any_preset_runs_as_it_does_in_the_core(overflows: list[bool]) -> None:
    policy = preset("megatron", initial_scale=2.0**6, growth_interval=2, min_scale=1.0, hysteresis=2)
    assert scales_of(GradScaler("cpu", policy=policy), overflows) == states_of(policy, overflows)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", [Headroom(), LogMax()], ids=["headroom", "logmax"])
def test_policy_sees_the_largest_unscaled_gradient(policy: Any, fused: bool) -> None:
    owners = [parameter(), parameter()]
    optimizers = [torch.optim.SGD([owner], lr=0.0, fused=fused) for owner in owners]
    scaler = ready(GradScaler("cpu", policy=policy))
    state = policy.start()
    for step in range(30):
        true = 2.0 ** (-(step % 7))
        for owner, share in zip(owners, (0.25, 1.0), strict=True):
            give((owner, true * share * scaler.get_scale()))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        state = policy.next(state, Seen(amax=np.float32(true)), np)
        assert scaler.get_scale() == float(state.scale)


@pytest.mark.parametrize("fused", [False, True])
def test_histogram_is_shown_the_share_above_its_edge(fused: bool) -> None:
    policy = Histogram(init_scale=8.0)
    small, large = parameter(shape=(30,)), parameter(shape=(10,))
    optimizers = [torch.optim.SGD([owner], lr=0.0, fused=fused) for owner in (small, large)]
    scaler = ready(GradScaler("cpu", policy=policy))
    give((small, 0.0), (large, 2 * policy.edge_magnitude))
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    expected = policy.next(policy.start(), Seen(upper_share=np.float32(0.25)), np)
    assert scaler.get_scale() == float(expected.scale) != 8.0


def test_gradients_of_several_optimizers_are_seen_as_one() -> None:
    def noted(amax: float, share: float, elements: int, *, loss_counts: bool = True, **flags: bool) -> Noted:
        given = {name: np.bool_(flag) for name, flag in flags.items()}
        facts = Facts(Seen(amax=np.float32(amax), upper_share=np.float32(share), **given))
        return Noted(None, facts, [facts], amax=True, elements=elements, loss_counts=loss_counts)

    both = [noted(4.0, 0.0, 30), noted(2.0, 1.0, 10)]
    seen = Merged(noted=both).seen()
    assert (seen.finite, seen.amax, seen.upper_share) == (True, 4.0, 0.25)
    for loss_counts in (True, False):
        bad = noted(torch.nan, 1.0, 1, finite=False, loss_finite=False, loss_counts=loss_counts)
        seen = Merged(noted=[*both, bad]).seen()
        assert (seen.finite, seen.loss_finite, seen.amax) == (False, not loss_counts, torch.inf)


def test_policy_that_would_reach_zero_stops_at_the_floor() -> None:
    scaler = GradScaler("cpu", policy=preset("torch", init_scale=2.0**-125))
    assert [scale for scale, _ in scales_of(scaler, [True] * 3)] == [2.0**-126] * 3


def test_hysteresis_alone_sets_no_floor_of_its_own() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, hysteresis=2)
    assert [scale for scale, _ in scales_of(scaler, [True, True, True])] == [1.0, 0.5, 0.25]


def test_interval_may_be_longer_than_any_run() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=10**12)
    assert scales_of(scaler, [False, False]) == [(8.0, 1), (8.0, 2)]


def test_static_policy_never_moves_the_scale() -> None:
    found = scales_of(GradScaler("cpu", policy=Static(64.0)), [True, False, False, True])
    assert [scale for scale, _ in found] == [64.0] * 4


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    ("policy", "written", "bounded"),
    [(Static(64.0), torch.inf, HIGHEST_SCALE), (Static(64.0), 0.0, LOWEST_SCALE), (CheckOnly(), 8.0, 1.0)],
)
def test_scale_that_other_code_sets_is_bounded_by_a_policy_that_keeps_it(
    policy: Policy, written: float, bounded: float
) -> None:
    scaler = ready(GradScaler("cpu", policy=policy))
    scaler._scale.fill_(written)
    assert [scale for scale, _ in scales_of(scaler, [False])] == [bounded]


def test_no_scaling_is_a_disabled_scaler() -> None:
    scaler = GradScaler("cpu", policy=NoScaling())
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})


def test_dynamic_has_torchs_numbers_and_its_own_bounds() -> None:
    scaler = GradScaler("cpu", policy=Dynamic(init_scale=8.0, min_scale=4.0, growth_interval=7))
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 7)
    assert [scale for scale, _ in scales_of(scaler, [True, True])] == [4.0, 4.0]


def test_policy_continues_from_a_scale_set_by_the_user() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, hysteresis=2)
    scales_of(scaler, [False])
    scaler.update(1024)
    assert [scale for scale, _ in scales_of(scaler, [True, True])] == [1024.0, 512.0]


@pytest.mark.parametrize(
    ("setter", "value", "field"),
    [("growth_factor", 4.0, "growth_factor"), ("backoff_factor", 0.25, "backoff_factor"), ("growth_interval", 1, None)],
)
def test_setters_change_the_policy_of_a_scaler_with_hysteresis(setter: str, value: float, field: str | None) -> None:
    del field
    scaler = GradScaler("cpu", init_scale=8.0, hysteresis=2)
    getattr(scaler, f"set_{setter}")(value)
    assert getattr(scaler, f"get_{setter}")() == value
    assert getattr(scaler._rule.policy, setter) == value  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
def test_setters_are_refused_where_the_policy_has_no_such_number(name: str) -> None:
    scaler = GradScaler("cpu", policy=Headroom())
    value = {"growth_factor": 4.0, "backoff_factor": 0.25}[name]
    with pytest.raises(
        ValueError, match=rf"The scale follows `Headroom`, which has no `{name}` to set\. Received: {name}="
    ):
        getattr(scaler, f"set_{name}")(value)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"init_scale": 4.0}, r"Received also: init_scale=4\.0\. Give these to the policy\."),
        ({"hysteresis": 2, "min_scale": 1.0}, r"Received also: min_scale=1\.0, hysteresis=2\."),
    ],
)
def test_policy_and_numbers_together_are_refused(argument: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"`policy` has all settings of the scale\. {text}"):
        GradScaler("cpu", policy=Static(2.0), **argument)


@pytest.mark.parametrize("bad", [Dynamic, 3])
def test_what_is_no_policy_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"`policy` must be a policy, such as `Dynamic\(\)`, .*Received: policy="):
        GradScaler("cpu", policy=bad)


def test_auto_is_headroom() -> None:
    saved = GradScaler("cpu", policy="auto").state_dict()
    assert saved == GradScaler("cpu", policy=Headroom()).state_dict()


def test_policy_that_needs_a_share_above_an_unknown_edge_is_refused() -> None:
    edgeless: Any = SimpleNamespace(needs=frozenset({"upper_share"}), start=Dynamic().start, next=Dynamic().next)
    with pytest.raises(TypeError, match=r"must have an `edge_magnitude`, as `Histogram` has"):
        GradScaler("cpu", policy=edgeless)


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        (
            {"min_scale": 0.0},
            ValueError,
            r"`min_scale` must lie between 2\*\*-126 and 2\*\*126, .*min_scale=0\.0",
        ),
        ({"max_scale": torch.inf}, ValueError, r"`max_scale` must lie between 2\*\*-126 and 2\*\*126"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, r"`min_scale` must not be above `max_scale`\."),
        ({"max_scale": 2.0}, ValueError, r"`init_scale` must be from 1\.17549e-38 to 2"),
        ({"min_scale": "1"}, TypeError, r"`min_scale` must be a number\."),
        ({"hysteresis": 0}, ValueError, r"`hysteresis` must be between 1 and 2\*\*31 - 1\."),
        ({"hysteresis": 1.5}, TypeError, r"`hysteresis` must be an integer\."),
    ],
)
def test_bounds_and_hysteresis_are_checked(argument: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        GradScaler("cpu", **argument)


@settings(max_examples=30, deadline=None)
@given(overflows=FLAGS)
def test_scale_stays_within_its_bounds(overflows: list[bool]) -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1, min_scale=3.0, max_scale=10.0)
    assert all(3.0 <= scale <= 10.0 for scale, _ in scales_of(scaler, overflows))


def test_growth_to_infinity_is_not_taken() -> None:
    numbers = {"init_scale": 2.0**120, "growth_factor": 16.0, "growth_interval": 1}
    found = scales_of(GradScaler("cpu", **numbers), [False] * 3)
    assert [scale for scale, _ in found] == [2.0**124] * 3
    assert found == scales_of(TORCH("cpu", **numbers), [False] * 3)


@pytest.mark.parametrize("fused", [False, True])
def test_check_alone_needs_no_call_of_scale(fused: bool) -> None:
    owner = parameter()
    scaler, optimizer = GradScaler("cpu", policy=CheckOnly()), torch.optim.SGD([owner], lr=1.0, fused=fused)
    skipped = []
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        (owner.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(last_of(scaler).skipped())
    assert skipped == [False, True, False]
    assert owner.tolist() == [-1.0] * 3
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("policy", [Headroom(), LogMax()], ids=repr)
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize("grad", [0.0, 1e-45, 1e-38, 3e38])
def test_no_gradient_makes_numpy_warn(grad: float, clip: dict[str, float], policy: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = GradScaler("cpu", policy=policy)
    for _ in range(3):
        scaler.scale(weight.sum())
        weight.grad = torch.full_like(weight, grad)
        scaler.step(optimizer, **clip)
        scaler.update()
    assert scaler.get_scale() > 0


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("size", [1e-36, 1e-40, 0.0])
def test_numpy_that_raises_for_an_underflow_does_not_stop_a_step(size: float, clip: Any, kind: str) -> None:
    owner = torch.nn.Parameter(torch.ones(3))
    how: dict[str, Any] = {kind: True}
    optimizer = torch.optim.AdamW([owner], **how)
    scaler = GradScaler("cpu", policy="auto")
    with np.errstate(all="raise"):
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale((owner * size).sum()).backward()
            scaler.step(optimizer, **clip)
            scaler.update()
    assert scaler.metrics()["applied"] > 0
