"""Every adapter goes through the states of the table, step by step."""

import math

import numpy as np
import pytest
from tests.conformance.adapters import Adapter, Array, Difference
from tests.conformance.skips import losses, skip_if_different, skip_if_sampled
from tests.conformance.states import BAD_BOTH, BAD_LOSS, CLEAN, INF, NAN, NO_GRADS, STATE_CASES, Event, Row, StateCase

from gradscale import NoScaling, Policy, Status

STATUS = {
    CLEAN: Status.APPLIED,
    INF: Status.OVERFLOW,
    NAN: Status.OVERFLOW,
    BAD_LOSS: Status.NONFINITE_LOSS,
    BAD_BOTH: Status.NONFINITE_LOSS,
    NO_GRADS: Status.NO_GRADS,
}

LOSS = {BAD_LOSS: math.nan, BAD_BOTH: math.inf}

ONLY_TORCHS = ("scale", "clean_steps")
"""What there is of a state where that is a documented difference."""


def gradient(event: Event, scale: float) -> Array | None:
    """Returns a gradient, made at `scale`, that brings the event about."""
    first = {INF: math.inf, NAN: math.nan, BAD_BOTH: math.nan}.get(event, 0.5 * scale)
    return None if event is NO_GRADS else np.array([first, -0.25 * scale], np.float32)


def expected_status(policy: Policy, event: Event) -> Status:
    return Status.APPLIED if isinstance(policy, NoScaling) else STATUS[event]


def involved(case: StateCase) -> set[Difference]:
    found = losses(LOSS.get(row.event, 1.0) for row in case.rows)
    found |= {"no grads"} if any(row.event is NO_GRADS for row in case.rows) else set()
    return found | ({"no scaling"} if isinstance(case.policy, NoScaling) else set())


@pytest.mark.parametrize("case", STATE_CASES, ids=lambda case: case.name)
def test_the_whole_state_is_as_the_table_says_after_every_step(adapter: Adapter, case: StateCase) -> None:
    skip_if_sampled(adapter, "states", case, STATE_CASES)
    skip_if_different(adapter, involved(case))
    names = ONLY_TORCHS if "state" in adapter.differs else Row._fields[1:]
    session = adapter.open(case.policy, {"weight": np.zeros(2, np.float32)}, lr=0.125)
    for number, row in enumerate(case.rows):
        before = session.state()["scale"]
        grads = {"weight": gradient(row.event, before)}
        step = session.step(grads, loss=LOSS.get(row.event, 1.0))
        state = session.state()
        assert {name: state[name] for name in names} == {name: getattr(row, name) for name in names}, number
        if step.reported is not None:
            assert step.reported.status is expected_status(case.policy, row.event), number
            assert (step.reported.scale, step.reported.next_scale) == (before, row.scale), number
