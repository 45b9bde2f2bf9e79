"""Every adapter goes through the states of the table, step by step."""

import math

import numpy as np
import pytest
from tests.conformance.adapters import Adapter, Array
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


def gradient(event: Event, scale: float) -> Array | None:
    """Returns a gradient, made at `scale`, that brings the event about."""
    first = {INF: math.inf, NAN: math.nan, BAD_BOTH: math.nan}.get(event, 0.5 * scale)
    return None if event is NO_GRADS else np.array([first, -0.25 * scale], np.float32)


def expected_status(policy: Policy, event: Event) -> Status:
    return Status.APPLIED if isinstance(policy, NoScaling) else STATUS[event]


@pytest.mark.parametrize("case", STATE_CASES, ids=lambda case: case.name)
def test_the_whole_state_is_as_the_table_says_after_every_step(adapter: Adapter, case: StateCase) -> None:
    session = adapter.open(case.policy, {"weight": np.zeros(2, np.float32)}, lr=0.125)
    for number, row in enumerate(case.rows):
        grads = {"weight": gradient(row.event, session.state()["scale"])}
        step = session.step(grads, loss=LOSS.get(row.event, 1.0))
        state = session.state()
        assert {name: state[name] for name in Row._fields[1:]} == dict(zip(Row._fields[1:], row[1:], strict=True)), (
            number
        )
        assert step.status is expected_status(case.policy, row.event), number
