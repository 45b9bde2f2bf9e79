"""Every adapter turns the gradients of the table into the updates of the table."""

import math
from typing import Any

import numpy as np
import pytest
from tests.conformance.adapters import Adapter, Array, Difference, Step
from tests.conformance.gradient_types import NUMPY_TYPES, parameter_type, skip_unless_taken
from tests.conformance.skips import losses, skip_if_different, skip_if_sampled
from tests.conformance.updates import LR, UPDATE_CASES, Update, UpdateCase, Values

from gradscale import NoScaling

# float32 holds no more of a norm, and clipping adds 1e-6 to it.
TOLERANCE = 1e-6


def arrays(values: Values, dtype: str) -> dict[str, Array]:
    return {name: np.array(items, NUMPY_TYPES[dtype]) for name, items in values.items()}


def assert_close(found: Any, expected: Values, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, items in expected.items():
        np.testing.assert_allclose(found[name], np.array(items), rtol=tolerance, atol=0, err_msg=name)


def assert_update(step: Step, expected: Update) -> None:
    tolerance = TOLERANCE if expected.clip_norm is not None else 0.0
    assert_close(step.params, expected.params, tolerance)
    if expected.applied is None:
        assert step.grads is None
    else:
        assert_close(step.grads, expected.applied, tolerance)
    if step.factor is not None:
        assert step.factor == pytest.approx(expected.factor, rel=tolerance, abs=0)
    if step.reported is not None:
        assert step.reported.status is expected.status


def squares_overflow(update: Update) -> bool:
    """Returns whether the norm is an overflow though the gradients are not: not seen where the user clips."""
    return update.norm == math.inf and all(math.isfinite(item) for items in update.grads.values() for item in items)


def norm_is_infinite(update: Update) -> bool:
    return update.norm == math.inf


def involved(case: UpdateCase) -> set[Difference]:
    found = losses(update.loss for update in case.steps)
    found |= {"norm"} if any(map(squares_overflow, case.steps)) else set()
    found |= set() if all(update.grads for update in case.steps) else {"no grads"}
    # A checking policy skips such a step before anything is clipped.
    found |= {"infinite norm"} if NoScaling() == case.policy and any(map(norm_is_infinite, case.steps)) else set()
    return found | ({"no scaling"} if isinstance(case.policy, NoScaling) else set())


@pytest.mark.parametrize("case", UPDATE_CASES, ids=lambda case: case.name)
def test_gradients_become_the_update_of_the_table(adapter: Adapter, case: UpdateCase) -> None:
    skip_unless_taken(adapter, case.dtype)
    skip_if_sampled(adapter, "updates", case, UPDATE_CASES)
    skip_if_different(adapter, involved(case))
    params = arrays(case.params, parameter_type(case.dtype))
    session = adapter.open(case.policy, params, lr=LR)
    for expected in case.steps:
        grads = arrays(expected.grads, case.dtype)
        step = session.step(
            {name: grads.get(name) for name in params}, clip_norm=expected.clip_norm, loss=expected.loss
        )
        assert_update(step, expected)
        if step.reported is not None and "norm" not in adapter.differs and expected.norm is not None:
            assert step.reported.grad_norm == pytest.approx(expected.norm, rel=TOLERANCE)
