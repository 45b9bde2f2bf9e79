"""Rules on scalars of the host, called and compiled, beside the same rules on arrays."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stories import same

from gradscale import FP8_E5M2, Dynamic, Headroom, Histogram, LogMax, Policy
from gradscale.policies.compiled import compiled
from gradscale.policies.contract import Seen, advanced
from gradscale.policies.scalars import EXACT, SCALARS, compiled_rule
from gradscale.record import fields, place

pytestmark = pytest.mark.skipif(not EXACT, reason="numpy 1 makes float64 of a float32 scalar times a number")

POLICIES = [
    Headroom(),
    Headroom(FP8_E5M2, init_scale=1.0, leak=0.1),
    LogMax(),
    Histogram(),
    Dynamic(growth_interval=2, hysteresis=2),
]

exponents = st.integers(-140, 120).map(lambda exponent: float(np.ldexp(np.float32(1.37), exponent)))
steps = st.builds(
    lambda amax, finite, loss_finite, share: Seen(
        finite=np.bool_(finite),
        loss_finite=np.bool_(loss_finite),
        amax=np.float32(amax if finite else np.inf),
        upper_share=np.float32(share),
    ),
    exponents | st.just(0.0),
    st.sampled_from([True, True, False]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([0.0, 2.0**-20, 1.0]),
)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(story=st.lists(steps, max_size=30))
def test_rule_on_scalars_has_the_states_of_the_rule_on_arrays(policy: Policy, story: list[Seen]) -> None:
    namespaces: list[Any] = [SCALARS, np]
    states = [policy.start(), policy.start()]
    with np.errstate(all="ignore"):
        for seen in story:
            states = [policy.next(state, seen, xp) for state, xp in zip(states, namespaces, strict=True)]
            assert same(*states)


def scalars(record: Any) -> Any:
    return place(record, lambda array: array[()])


def types_of(state: Any) -> list[type]:
    return [type(getattr(state, field.name)) for field in fields(state)]


@pytest.mark.parametrize("policy", [*POLICIES, Dynamic(min_scale=2.0**-126)], ids=repr)
@given(story=st.lists(steps, max_size=30))
def test_a_compiled_rule_has_the_states_of_the_rule_on_arrays(policy: Policy, story: list[Seen]) -> None:
    ours, expected = scalars(policy.start()), policy.start()
    with np.errstate(all="ignore"):
        for seen in story:
            ours, expected = advanced(policy, ours, seen, SCALARS), advanced(policy, expected, seen, np)
            assert same(ours, expected)
            assert types_of(ours) == types_of(scalars(policy.start()))


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if "amax" in policy.needs], ids=repr)
@given(story=st.lists(steps, max_size=30))
def test_a_compiled_rule_that_predicts_does_not_warn_of_a_clean_step(policy: Policy, story: list[Seen]) -> None:
    state = scalars(policy.start())
    for seen in story:
        with np.errstate(all="warn" if seen.finite else "ignore", under="ignore"):
            state = advanced(policy, state, seen, SCALARS)
    assert np.isfinite(state.scale)


@dataclass(frozen=True, slots=True, repr=False)
class Branching(Headroom):
    """A rule of a user, which cannot be traced."""

    def next(self, state: Any, seen: Seen, xp: Any) -> Any:
        return state if state.scale < 4 else replace(state, scale=state.scale * np.float32(0.5))


def test_a_rule_of_a_user_is_called() -> None:
    policy = Branching()
    state = policy.start()
    for _ in range(20):
        state = advanced(policy, state, Seen(), SCALARS)
    assert state.scale == 2.0


def test_a_rule_of_a_user_is_not_kept() -> None:
    policy, kept = Branching(), compiled_rule.cache_info().currsize
    SCALARS.rule(policy)(policy.start(), Seen())
    assert compiled_rule.cache_info().currsize == kept


def test_a_rule_that_branches_on_a_value_cannot_be_compiled() -> None:
    with pytest.raises(TypeError, match="A rule may not branch on a value: it is known only when the step is run"):
        compiled(Branching().next, state=Branching().start(), seen=Seen())


@dataclass(frozen=True, slots=True, repr=False)
class Half(Dynamic):
    """A rule without operations, and one that is the same twice."""

    is_compiled: ClassVar[bool] = True

    def next(self, state: Any, seen: Seen, xp: Any) -> Any:
        return replace(state, scale=state.scale * 0.5 + state.scale * 0.5, applied=np.int32(7))


def test_numbers_and_operations_that_are_the_same_are_kept() -> None:
    state = advanced(Half(), scalars(Half().start()), Seen(), SCALARS)
    assert (state.scale, state.applied) == (65536.0, 7)


def test_no_policy_is_taken_for_another_one() -> None:
    for scale in (4.0, 8.0, 4.0):
        state = scalars(Dynamic(init_scale=scale).start())
        assert SCALARS.rule(Dynamic(init_scale=scale))(state, Seen(finite=np.bool_(False))).scale == scale / 2
        assert SCALARS.rule(Dynamic(init_scale=scale, backoff_factor=0.25))(state, Seen()).scale == scale
