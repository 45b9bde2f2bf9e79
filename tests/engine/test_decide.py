"""The decision of a step: the gate, the one factor that unscales and clips, and the next state."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stories import next_of

from gradscale import Dynamic, NoScaling, ScaleState, Seen, Static
from gradscale.engine.decide import CLIP_EPSILON, decide


def seen(finite: bool = True, loss_finite: bool = True, norm: float = 0.0) -> Seen:
    return Seen(finite=np.bool_(finite), loss_finite=np.bool_(loss_finite), norm=np.float32(norm))


def test_a_clean_step_is_applied_and_its_gradients_divided_by_the_scale() -> None:
    policy = Static(1024)
    outcome = decide(policy, policy.start(), seen(), np)
    assert outcome.applied
    assert outcome.factor == 1 / 1024
    assert outcome.state.applied == 1


def test_the_factor_uses_the_scale_that_made_the_gradients_and_not_the_next_one() -> None:
    policy = Dynamic(init_scale=8, growth_interval=1)
    outcome = decide(policy, policy.start(), seen(), np)
    assert outcome.state.scale == 16
    assert outcome.factor == 1 / 8


@pytest.mark.parametrize(("finite", "loss_finite"), [(False, True), (True, False), (False, False)])
def test_a_step_with_anything_non_finite_is_skipped_and_its_factor_is_zero(finite: bool, loss_finite: bool) -> None:
    policy = Dynamic(init_scale=8)
    outcome = decide(policy, policy.start(), seen(finite, loss_finite), np, clip_norm=1.0)
    assert not outcome.applied
    assert outcome.factor == 0
    assert outcome.state.skipped == 1


def test_the_next_state_is_the_policys() -> None:
    policy = Dynamic(init_scale=8)
    outcome = decide(policy, policy.start(), seen(finite=False), np)
    expected = next_of(policy, policy.start(), seen(finite=False))
    assert outcome.state.to_dict() == expected.to_dict()


def test_a_norm_above_the_bound_is_clipped_in_the_same_factor() -> None:
    outcome = decide(Static(8), Static(8).start(), seen(norm=4.0), np, clip_norm=1.0)
    assert outcome.factor == pytest.approx(1 / 8 / (4 + CLIP_EPSILON), rel=1e-6)


def test_a_bound_in_double_precision_leaves_the_factor_in_single() -> None:
    outcome = decide(Static(8), Static(8).start(), seen(norm=4.0), np, clip_norm=np.float64(1.0))
    assert outcome.factor.dtype == np.float32


def test_a_norm_below_the_bound_is_not_clipped() -> None:
    outcome = decide(Static(8), Static(8).start(), seen(norm=0.5), np, clip_norm=1.0)
    assert outcome.factor == 1 / 8


def test_a_norm_of_zero_is_not_clipped() -> None:
    assert decide(Static(8), Static(8).start(), seen(norm=0.0), np, clip_norm=1.0).factor == 1 / 8


def test_the_norm_is_not_looked_at_without_a_bound() -> None:
    assert decide(Static(8), Static(8).start(), seen(norm=1e30), np).factor == 1 / 8


@given(norm=st.floats(0, 2.0**100, width=32), clip_norm=st.floats(2.0**-20, 2.0**20, width=32))
def test_the_clipped_norm_never_exceeds_the_bound_by_more_than_rounding(norm: float, clip_norm: float) -> None:
    outcome = decide(Static(1), Static(1).start(), seen(norm=norm), np, clip_norm=clip_norm)
    assert norm * float(outcome.factor) <= clip_norm * (1 + 1e-6)
    assert outcome.factor <= 1


def test_clipping_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([3.0, 4.0, 12.0])
    norm = torch.nn.utils.clip_grad_norm_([weight], 2.0)
    outcome = decide(Static(1), Static(1).start(), seen(norm=norm.item()), np, clip_norm=2.0)
    np.testing.assert_allclose(np.array([3.0, 4.0, 12.0]) * outcome.factor, weight.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize(("finite", "loss_finite"), [(True, True), (False, True), (True, False), (False, False)])
def test_no_scaling_applies_every_step_whatever_it_looks_like(finite: bool, loss_finite: bool) -> None:
    outcome = decide(NoScaling(), NoScaling().start(), seen(finite, loss_finite), np)
    assert outcome.applied
    assert outcome.factor == 1
    assert (outcome.state.applied, outcome.state.skipped) == (1, 0)


def test_no_scaling_still_clips() -> None:
    outcome = decide(NoScaling(), NoScaling().start(), seen(norm=4.0), np, clip_norm=1.0)
    assert outcome.factor == pytest.approx(0.25, rel=1e-5)


def test_one_call_decides_for_a_vector_of_scales() -> None:
    policy = Dynamic(init_scale=8)
    state = replace(policy.start(), scale=np.array([2, 4, 8], np.float32))
    flags = Seen(finite=np.array([True, False, True]))
    outcome = decide(policy, state, flags, np)
    assert outcome.applied.tolist() == [True, False, True]
    assert outcome.factor.tolist() == [0.5, 0.0, 0.125]
    assert outcome.state.scale.tolist() == [2, 2, 8]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_the_factor_is_float32(clip_norm: Any) -> None:
    policy = Dynamic()
    assert decide(policy, policy.start(), seen(norm=3.0), np, clip_norm).factor.dtype == np.float32


def test_the_state_before_the_step_is_left_as_it_was() -> None:
    state = ScaleState(scale=np.float32(8))
    decide(Dynamic(), state, seen(finite=False), np)
    assert state == ScaleState(scale=np.float32(8))


@pytest.mark.parametrize("min_scale", [2.0**-126, 2.0**-30])
def test_an_overflow_at_a_scale_that_is_useless_is_stuck_whatever_the_floor(min_scale: float) -> None:
    policy = Dynamic(init_scale=2.0**-23, min_scale=min_scale)
    state = policy.start()
    found: list[tuple[float, bool]] = []
    for _ in range(3):
        state = decide(policy, state, Seen(finite=np.bool_(False)), np).state
        found.append((float(state.scale), bool(state.stuck)))
    assert found == [(2.0**-24, False), (2.0**-25, True), (2.0**-26, True)]
