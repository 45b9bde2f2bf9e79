"""Steps for the tests of presets: run one over flags, and hold an exported state to going on as before."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.stories import next_of

from gradscale.peers import export_state, import_state
from gradscale.policies.contract import Policy, Seen

FLAGS = st.lists(st.booleans(), max_size=60)


def advanced(policy: Policy, state: Any, overflow: bool, **seen: Any) -> Any:
    """Returns the state after one step."""
    facts = {name: np.float32(value) for name, value in seen.items()}
    return next_of(policy, state, Seen(finite=np.bool_(not overflow), **facts))


def walked(policy: Policy, overflows: Iterable[bool]) -> Any:
    """Returns the state after a run from the start."""
    state = policy.start()
    for overflow in overflows:
        state = advanced(policy, state, overflow)
    return state


def scales(policy: Policy, overflows: Iterable[bool]) -> list[float]:
    """Returns the scale after each step of a run from the start."""
    state, seen = policy.start(), []
    for overflow in overflows:
        state = advanced(policy, state, overflow)
        seen.append(float(state.scale))
    return seen


def assert_goes_on(system: str, policy: Policy, state: Any, overflows: Iterable[bool], **beside: Any) -> None:
    """Exports `state`, imports it again, and lets both go on; scale and clean steps must agree after each step.

    `beside` are settings that the system does not save.
    """
    other_policy, other = import_state(system, {**export_state(system, policy, state), **beside})
    for overflow in overflows:
        state, other = advanced(policy, state, overflow), advanced(other_policy, other, overflow)
        assert float(other.scale) == float(state.scale)
        assert int(other.clean_steps) == int(state.clean_steps)
