"""What `Dynamic` promises whatever its settings and whatever happens."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.stories import after, same

from gradscale import CheckOnly, Dynamic, ScaleState
from gradscale.record import numbers, place, with_values

scales = st.floats(2.0**-126, 2.0**126, width=32)


@st.composite
def dynamics(draw: st.DrawFn) -> Dynamic:
    low, init, high = sorted(draw(st.lists(scales, min_size=3, max_size=3)))
    return Dynamic(
        init_scale=init,
        growth_factor=draw(st.floats(1, 2.0**127, width=32, exclude_min=True)),
        backoff_factor=draw(st.floats(0, 1, width=32, exclude_min=True, exclude_max=True)),
        growth_interval=draw(st.integers(1, 4) | st.integers(1, 2**31 - 1)),
        hysteresis=draw(st.integers(1, 4)),
        refill=draw(st.sampled_from(["growth", "clean"])),
        min_scale=low,
        max_scale=high,
    )


stories = st.text("ccccoobl", max_size=40)
states = st.builds(
    ScaleState,
    scale=st.floats(0, width=32, allow_nan=False).map(np.float32),
    clean_steps=st.integers(0, 2**31 - 100).map(np.int32),
    credits=st.integers(0, 2**31 - 100).map(np.int32),
)


@given(dynamics(), stories)
def test_the_scale_never_leaves_its_bounds(policy: Dynamic, story: str) -> None:
    state = policy.start()
    for letter in story:
        state = after(policy, letter, state)
        assert policy.min_scale <= state.scale <= policy.max_scale
        assert 0 <= state.credits <= policy.hysteresis
        assert 0 <= state.clean_steps < policy.growth_interval


@given(dynamics(), stories, states)
def test_no_state_whatever_leads_to_a_scale_out_of_bounds(policy: Dynamic, story: str, state: ScaleState) -> None:
    for letter in story:
        state = after(policy, letter, state)
        assert policy.min_scale <= state.scale <= policy.max_scale


@given(st.floats(1.25, 100), st.floats(2, 2.0**20))
def test_growth_ends_exactly_at_the_ceiling_whatever_the_factor(growth_factor: float, max_scale: float) -> None:
    policy = Dynamic(init_scale=1, growth_interval=1, growth_factor=growth_factor, max_scale=max_scale)
    assert after(policy, "c" * 70).scale == policy.max_scale


@example(Dynamic(init_scale=2.0**-126, growth_factor=2.0**99, min_scale=2.0**-126, max_scale=2.0**-52), 1.0)
@given(dynamics(), scales)
def test_growth_is_the_float32_product_or_the_ceiling_if_that_is_lower(policy: Dynamic, scale: float) -> None:
    before = ScaleState(scale=np.float32(min(max(scale, policy.min_scale), policy.max_scale)))
    with np.errstate(over="ignore"):
        product = before.scale * np.float32(policy.growth_factor)
    assert after(replace(policy, growth_interval=1), "c", before).scale == min(product, policy.max_scale)


@given(dynamics(), stories)
def test_every_step_is_counted_once(policy: Dynamic, story: str) -> None:
    state = after(policy, story)
    assert state.applied == story.count("c")
    assert state.applied + state.skipped == len(story)
    assert state.consecutive_skips == len(story) - len(story.rstrip("obl"))


@given(dynamics(), stories)
def test_types_are_the_same_after_any_number_of_steps(policy: Dynamic, story: str) -> None:
    state = after(policy, story)
    for field in fields(state):
        assert getattr(state, field.name).dtype == field.metadata["dtype"]


@given(dynamics(), stories)
def test_overflow_never_raises_the_scale_and_a_clean_step_never_lowers_it(policy: Dynamic, story: str) -> None:
    state = policy.start()
    for letter in story:
        before, state = state, after(policy, letter, state)
        assert state.scale >= before.scale if letter == "c" else state.scale <= before.scale


@given(dynamics(), stories)
def test_a_run_can_be_saved_at_any_step_and_goes_on_the_same(policy: Dynamic, story: str) -> None:
    half = len(story) // 2
    saved = after(policy, story[:half])
    read_policy, read_state = Dynamic.from_dict(policy.to_dict()), ScaleState.from_dict(saved.to_dict())
    assert read_policy == policy
    assert same(after(read_policy, story[half:], read_state), after(policy, story))


@settings(max_examples=50)
@given(st.lists(dynamics(), min_size=1, max_size=5), stories, st.sampled_from(["growth", "clean"]))
def test_a_vector_of_policies_runs_as_each_does_alone(policies: list[Dynamic], story: str, refill: Any) -> None:
    policies = [replace(policy, refill=refill) for policy in policies]
    names = numbers(policies[0])
    columns = {n: np.array([getattr(p, n) for p in policies], np.asarray(getattr(policies[0], n)).dtype) for n in names}
    vector = place(with_values(policies[0], columns), lambda array: array)
    state = after(vector, story)
    for index, policy in enumerate(policies):
        alone = after(policy, story)
        for field in fields(alone):
            leaf = np.broadcast_to(getattr(state, field.name), (len(policies),))
            assert leaf.dtype == field.metadata["dtype"]
            assert leaf[index] == getattr(alone, field.name), field.name


@given(dynamics(), stories)
def test_settings_placed_as_arrays_give_the_same_scales_as_plain_numbers(policy: Dynamic, story: str) -> None:
    assert same(after(place(policy, lambda array: array), story), after(policy, story))


@given(stories)
def test_a_check_alone_stays_at_one_and_a_vector_of_states_runs_as_each_does_alone(story: str) -> None:
    policy = CheckOnly()
    state = after(policy, story)
    assert state.scale == 1
    assert (state.applied, state.skipped) == (story.count("c"), len(story) - story.count("c"))
    both = after(policy, story, place(policy.start(), lambda array: np.repeat(array, 2)))
    assert all((getattr(both, field.name) == getattr(state, field.name)).all() for field in fields(state))
    assert CheckOnly.from_dict(policy.to_dict()) == policy
    assert ScaleState.from_dict(state.to_dict()) == state
