"""What `Headroom`, `LogMax` and `Histogram` all promise, whatever they are fed and however they are set."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stories import next_of

from gradscale import BF16, FP16, FP32, Dynamic, Format, Seen
from gradscale.formats import FORMATS
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE
from gradscale.policies.contract import backed_off
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.record import fields, number_type, place, with_values

STEPS = 40
KINDS = (Headroom, LogMax, Histogram)
MAGNITUDES = (0.0, -1.0, 1e-45, 2.0**-126, 1e-7, 1.0, 65504.0, 3.4e38, np.inf, -np.inf, np.nan)

shares = st.floats(0, 0.99)
bits = st.integers(0, 15)
magnitudes = st.sampled_from(MAGNITUDES) | st.floats(width=32) | st.floats(-40, 40).map(lambda exponent: 2.0**exponent)
events = st.lists(st.tuples(st.booleans(), st.integers(0, 9), magnitudes, magnitudes), min_size=1, max_size=STEPS)


@st.composite
def bounds(draw: st.DrawFn, lowest: int = -126, highest: int = 126) -> dict[str, float]:
    """Draws powers of two for the scale and its bounds."""
    low, start, high = sorted(draw(st.lists(st.integers(lowest, highest), min_size=3, max_size=3)))
    return {"min_scale": 2.0**low, "init_scale": 2.0**start, "max_scale": 2.0**high}


@st.composite
def policies(draw: st.DrawFn, kind: Any, **fixed: Any) -> Any:
    """Draws a policy with any valid settings."""
    own: Mapping[type, Mapping[str, st.SearchStrategy[Any]]] = {
        Headroom: {"margin_bits": bits, "leak": st.floats(0, 0.12), "recovery": shares},
        LogMax: {"beta1": shares, "beta2": shares, "deviations": st.floats(0, 100)},
        Histogram: {"edge": st.floats(1e-6, 0.99), "threshold": shares, "period": st.integers(1, 9)},
        Dynamic: {"growth_interval": st.integers(1, 5), "backoff_factor": st.floats(0.1, 0.9)},
    }
    chosen: dict[str, Any] = {name: draw(strategy) for name, strategy in own[kind].items()} | draw(bounds())
    if kind is not Dynamic:
        chosen["format"] = draw(st.sampled_from(FORMATS))
    return kind(**(chosen | fixed))


def seen(event: tuple[bool, int, float, float]) -> Seen:
    """Returns what a step showed; one loss in ten is not finite."""
    finite, loss, amax, share = event
    return Seen(np.bool_(finite), np.bool_(loss > 0), amax=np.float32(amax), upper_share=np.float32(share))


def walk(policy: Any, story: list[Any], start: Any = None) -> list[Any]:
    """Returns the states after each step."""
    state = policy.start() if start is None else start
    states = []
    for event in story:
        state = next_of(policy, state, seen(event))
        states.append(state)
    return states


def leaves(state: Any) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in fields(state)}


def assert_same(one: Any, other: Any) -> None:
    """Asserts that two states have the same bits and types."""
    for name, value in leaves(one).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(getattr(other, name)), err_msg=name, strict=True)


def stack(policies: list[Any], starts: list[Any]) -> tuple[Any, Any]:
    """Returns policies of one kind as one with vectors for settings, and their states as one state of vectors."""
    types = {field.name: number_type(field.type) for field in fields(policies[0])}
    dtypes = {name: {float: np.float32, int: np.int32}[kind] for name, kind in types.items() if kind is not None}
    columns = {name: np.array([getattr(p, name) for p in policies], dtype) for name, dtype in dtypes.items()}
    states = {name: np.array([leaves(start)[name] for start in starts]) for name in leaves(starts[0])}
    return with_values(policies[0], columns), with_values(starts[0], states)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), story=events)
@settings(max_examples=60, deadline=None)
def test_the_scale_is_a_power_of_two_within_bounds_and_every_leaf_finite_whatever_arrives(
    kind: type, data: st.DataObject, story: list[Any]
) -> None:
    policy = data.draw(policies(kind))
    for state in walk(policy, story):
        assert policy.min_scale <= state.scale <= policy.max_scale
        assert np.frexp(state.scale)[0] == 0.5
        assert all(np.isfinite(value) for value in leaves(state).values())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), story=events, low=st.floats(1e-30, 3), width=st.floats(1.01, 1000))
@settings(max_examples=30, deadline=None)
def test_bounds_that_are_not_powers_of_two_hold_too(
    kind: type, data: st.DataObject, story: list[Any], low: float, width: float
) -> None:
    policy = data.draw(policies(kind, min_scale=low, init_scale=low, max_scale=low * width))
    for state in walk(policy, story):
        assert low <= state.scale <= low * width


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), story=events)
@settings(max_examples=40, deadline=None)
def test_many_policies_as_one_vector_take_the_steps_each_takes_alone(
    kind: type, data: st.DataObject, story: list[Any]
) -> None:
    chosen = [data.draw(policies(kind, format=FP16)) for _ in range(3)]
    policy, start = stack(chosen, [policy.start() for policy in chosen])
    together = walk(policy, story, start)
    for index, alone in enumerate(walk(policy, story) for policy in chosen):
        for states, state in zip(together, alone, strict=True):
            picked = {name: np.broadcast_to(value, 3)[index] for name, value in leaves(states).items()}
            assert_same(with_values(state, picked), state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_with_vectors_for_settings_starts_with_vectors(kind: type) -> None:
    chosen = [kind(init_scale=2.0**k, min_scale=2.0**-k) for k in (1, 5)]
    policy, start = stack(chosen, [policy.start() for policy in chosen])
    assert policy.start().scale.tolist() == start.scale.tolist() == [2.0, 32.0]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), story=events)
@settings(max_examples=30, deadline=None)
def test_a_saved_policy_and_state_go_on_as_if_never_saved(kind: type, data: st.DataObject, story: list[Any]) -> None:
    policy = data.draw(policies(kind))
    state = walk(policy, story)[-1]
    again = kind.from_dict(policy.to_dict())
    assert again == policy
    for one, other in zip(
        walk(policy, story, state), walk(again, story, type(state).from_dict(state.to_dict())), strict=True
    ):
        assert_same(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_no_leaf_at_its_default_comes_back_from_its_dict(kind: type) -> None:
    start = kind().start()
    odd = {"bool": np.bool_(True), "int32": np.int32(7), "float32": np.float32(0.375)}
    state = with_values(start, {field.name: odd[field.metadata["dtype"]] for field in fields(start)})
    assert_same(type(start).from_dict(state.to_dict()), state)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), story=events, finite=st.booleans(), amax=magnitudes, share=magnitudes)
@settings(max_examples=30, deadline=None)
def test_a_non_finite_loss_changes_nothing_but_the_counters(
    kind: type, data: st.DataObject, story: list[Any], finite: bool, amax: float, share: float
) -> None:
    policy = data.draw(policies(kind))
    state = walk(policy, story)[-1]
    after = next_of(policy, state, seen((finite, 0, amax, share)))
    counters = {"applied", "skipped", "consecutive_skips", "stuck"}
    for name, value in leaves(state).items():
        assert name in counters or value == getattr(after, name)
    assert (after.applied, after.skipped) == (state.applied, state.skipped + 1)
    assert after.consecutive_skips == state.consecutive_skips + 1


@pytest.mark.parametrize("kind", [*KINDS, Dynamic])
@pytest.mark.parametrize("loss_finite", [True, False])
@given(data=st.data(), story=events, amax=magnitudes)
@settings(max_examples=30, deadline=None)
def test_no_magnitude_of_a_step_that_overflowed_is_read(
    kind: type, loss_finite: bool, data: st.DataObject, story: list[Any], amax: float
) -> None:
    policy = data.draw(policies(kind))
    state = walk(policy, story)[-1]
    flags = np.bool_(False), np.bool_(loss_finite)
    overflowed = next_of(policy, state, Seen(*flags, amax=np.float32(np.inf), norm=np.float32(np.inf)))
    assert_same(overflowed, next_of(policy, state, Seen(*flags, amax=np.float32(amax), norm=np.float32(amax))))


@pytest.mark.parametrize("kind", [*KINDS, Dynamic])
@pytest.mark.parametrize("placed", [True, False])
@given(data=st.data(), story=events)
@settings(max_examples=20, deadline=None)
def test_torch_takes_the_same_steps(kind: type, placed: bool, data: st.DataObject, story: list[Any]) -> None:
    import torch

    policy = data.draw(policies(kind))
    rule = place(policy, torch.as_tensor) if placed else policy
    state = place(policy.start(), torch.as_tensor)
    for event, expected in zip(story, walk(policy, story), strict=True):
        state = rule.next(state, place(seen(event), torch.as_tensor), torch)
        assert_same(with_values(expected, {name: leaf.numpy() for name, leaf in leaves(state).items()}), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_backs_off_in_torch_without_a_look_at_the_gradients(kind: type) -> None:
    import torch

    policy = kind()
    state = place(policy.start(), torch.as_tensor)
    lowered = backed_off(policy, state, Seen(finite=torch.tensor(False), loss_finite=torch.tensor(True)), torch)  # type: ignore[arg-type]
    assert lowered.scale < state.scale
    assert lowered.skipped == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"format": "fp61"}, ValueError, r"There is no format of that name\. Received: 'fp61'\. Did you mean 'fp16'"),
        ({"init_scale": 0}, ValueError, r"`init_scale` must lie between 2\*\*-126 and 2\*\*126"),
        ({"min_scale": 2.0**17}, ValueError, r"`init_scale` must lie between `min_scale` and `max_scale`"),
        ({"max_scale": True}, TypeError, r"`max_scale` must be a number. Received: max_scale=True"),
    ],
)
def test_bad_bounds_and_formats_are_refused(
    kind: type, setting: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**setting)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_at_the_floor_is_stuck_and_a_clean_step_after_it_is_not(kind: type) -> None:
    policy = kind(init_scale=1.0, min_scale=1.0)
    overflow, clean = (False, 1, 0.0, 0.0), (True, 1, 1.0, 0.0)
    assert [bool(state.stuck) for state in walk(policy, [overflow, overflow, clean])] == [True, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_the_widest_format_at_the_highest_scale_overflows_nothing(kind: type) -> None:
    policy = kind(format=FP32, init_scale=HIGHEST_SCALE, min_scale=LOWEST_SCALE)
    story = [(True, 1, amax, 0.0) for amax in (3.4e38, 2.0**-126)] + [(False, 1, 0.0, 0.0)]
    assert all(np.isfinite(state.scale) for state in walk(policy, story * 10))


@pytest.mark.parametrize("kind", [Headroom, LogMax])
@pytest.mark.parametrize("format", [BF16, FP32])
def test_in_a_wide_format_the_squares_of_many_gradients_do_not_overflow(kind: type, format: Format) -> None:
    steps = walk(kind(format=format), [(True, 1, 1.0, 0.0)] * 200)
    squares = np.float32(2.0**30) * np.square(np.float32(steps[-1].scale))
    assert np.isfinite(squares)
    assert steps[-1].scale > 2.0**40
