"""Every adapter moves the scale as the table says when a policy looks at the size of the gradients."""

import numpy as np
import pytest
from tests.conformance.adapters import Adapter
from tests.conformance.scales import SCALE_CASES, ScaleCase


@pytest.mark.parametrize("case", SCALE_CASES, ids=lambda case: case.name)
def test_the_scale_follows_the_gradients_of_the_table(adapter: Adapter, case: ScaleCase) -> None:
    session = adapter.open(case.policy, {"first": np.zeros(1, np.float32), "second": np.zeros(1, np.float32)}, lr=0.125)
    for number, row in enumerate(case.rows):
        scaled = np.array(row.grads) * session.state()["scale"]
        first, second = scaled.astype(np.float32)
        session.step({"first": np.array([first]), "second": np.array([second])}, loss=row.loss)
        assert session.state()["scale"] == row.scale, number
